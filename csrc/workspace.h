// Divide the memory of a pass into arrays that begin at cache lines.
#pragma once
#include "simd.h"

namespace {

// Takes one array after the other from the memory at `base`. Without memory it only counts the bytes.
struct Workspace {
  char *base;
  int64_t bytes = 0;

  template <class Item>
  Item *take(int64_t count) {
    Item *array = base ? reinterpret_cast<Item *>(base + bytes) : nullptr;
    bytes += round_up(count * static_cast<int64_t>(sizeof(Item)), 64);
    return array;
  }
};

}  // namespace
