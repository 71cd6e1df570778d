// The tile registers of AMX, as a tile of the matrix products uses them: two tiles of float, for its left and its right
// columns, to which products of tiles of bfloat16 are added.
//
// AMX multiplies the tiles of `avx512_bf16`: the order of packed pairs is the one that tile registers load, so only
// `gemm_tile` differs, with 12 rows like the other tiles and head_dim padded to 32. Each thread sizes its registers at
// the start of a pass and releases them at its end; Linux is asked for them once, and where it refuses the next set is
// used. The tests run the set `amx` where the processor has AMX. `emulated_amx.cpp` computes the documented arithmetic
// of `tdpbf16ps`, with the same sizes and addresses, so that it is tested against the oracle on every processor.
#pragma once
#include "simd.h"

namespace {

#if AMX

// The registers, as numbers that the intrinsics of GCC can paste into an instruction.
#define SUMS_LEFT 0
#define SUMS_RIGHT 1
#define A_ROWS 2
#define B_LEFT 3
#define B_RIGHT 4
constexpr int TILES = 5;

struct TileSize {
  uint8_t rows;
  uint16_t bytes;  // of a row
};
constexpr uint16_t TILE_BYTES = 64;  // the most that a row can hold
constexpr TileSize TILE_SIZES[TILES] = {
    {TILE_ROWS, TILE_BYTES},  // (ROWS, LANES) floats
    {TILE_ROWS, TILE_BYTES},
    {TILE_ROWS, TILE_BYTES},  // (ROWS, DEPTH) bfloat16
    {16, TILE_BYTES},         // (DEPTH / 2, LANES, 2) bfloat16: pairs of adjacent rows
    {16, TILE_BYTES},
};
static_assert(LANES * sizeof(float) == TILE_BYTES && TILE_ROWS <= 16, "a row of a tile is a vector");

#define ALWAYS_INLINE __attribute__((always_inline))

#ifdef __AMX_BF16__

// Sets the sizes of the registers of this thread while it exists. Without them the instructions below are faults.
class TileSizes {
 public:
  explicit TileSizes(bool needed) : needed_(needed) {
    if (!needed) return;
    struct alignas(64) {  // the operand of LDTILECFG
      uint8_t palette = 1, first_row = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } operand;
    static_assert(sizeof operand == 64, "the operand has 64 bytes");
    for (int i = 0; i < TILES; i++) {
      operand.bytes[i] = TILE_SIZES[i].bytes;
      operand.rows[i] = TILE_SIZES[i].rows;
    }
    // Not _tile_loadconfig: GCC's declares 8 of the 64 bytes as read, so that the stores to the others may be left out.
    __asm__ volatile("ldtilecfg %0" : : "m"(operand));
  }
  ~TileSizes() {
    if (needed_) _tile_release();
  }
  TileSizes(const TileSizes &) = delete;
  TileSizes &operator=(const TileSizes &) = delete;

 private:
  const bool needed_;
};

class TileRegisters {
 public:
  static constexpr int64_t DEPTH = TILE_BYTES / sizeof(Bfloat16);  // of one product

  ALWAYS_INLINE TileRegisters() {
    __asm__ volatile("" ::: "memory");  // GCC does not know that a tile load reads memory
    _tile_zero(SUMS_LEFT);
    _tile_zero(SUMS_RIGHT);
  }
  // Add A B, for A (ROWS, DEPTH) with row stride `stride`, and the left and right columns of B, (DEPTH / 2, LANES, 2) each
  // with row stride `b_stride`.
  ALWAYS_INLINE void add_product(const Bfloat16 *a, int64_t stride, const Bfloat16 *left, const Bfloat16 *right,
                                 int64_t b_stride) {
    constexpr int64_t SIZE = sizeof(Bfloat16);
    _tile_loadd(A_ROWS, a, stride * SIZE);
    _tile_loadd(B_LEFT, left, b_stride * SIZE);
    _tile_loadd(B_RIGHT, right, b_stride * SIZE);
    _tile_dpbf16ps(SUMS_LEFT, A_ROWS, B_LEFT);
    _tile_dpbf16ps(SUMS_RIGHT, A_ROWS, B_RIGHT);
  }
  // Write the sums, (ROWS, LANES) each.
  ALWAYS_INLINE void store(float *left, float *right) const {
    _tile_stored(SUMS_LEFT, left, TILE_BYTES);
    _tile_stored(SUMS_RIGHT, right, TILE_BYTES);
  }
};

#else  // the same arithmetic without the instructions, so that it can be tested on every CPU

class TileSizes {
 public:
  explicit TileSizes(bool needed) { sized = needed; }
  ~TileSizes() { sized = false; }
  TileSizes(const TileSizes &) = delete;
  TileSizes &operator=(const TileSizes &) = delete;

  static thread_local bool sized;
};
thread_local bool TileSizes::sized = false;

class TileRegisters {
 public:
  static constexpr int64_t DEPTH = TILE_BYTES / sizeof(Bfloat16);

  TileRegisters() {
    if (!TileSizes::sized) __builtin_trap();  // as the instructions
  }
  void add_product(const Bfloat16 *a, int64_t stride, const Bfloat16 *left, const Bfloat16 *right, int64_t b_stride) {
    load(A_ROWS, a, stride);
    load(B_LEFT, left, b_stride);
    load(B_RIGHT, right, b_stride);
    multiply(SUMS_LEFT, A_ROWS, B_LEFT);
    multiply(SUMS_RIGHT, A_ROWS, B_RIGHT);
  }
  void store(float *left, float *right) const {
    memcpy(left, data_[SUMS_LEFT], TILE_SIZES[SUMS_LEFT].rows * TILE_BYTES);
    memcpy(right, data_[SUMS_RIGHT], TILE_SIZES[SUMS_RIGHT].rows * TILE_BYTES);
  }

 private:
  void load(int to, const Bfloat16 *from, int64_t stride) {
    for (int64_t row = 0; row < TILE_SIZES[to].rows; row++)
      memcpy(data_[to][row], from + row * stride, TILE_SIZES[to].bytes);
  }
  // TDPBF16PS: the products of the first elements of all pairs are added up, then those of the second ones, and the sum of
  // both is added. Numbers below 2^-126 count as 0.
  void multiply(int sums, int a, int b) {
    for (int64_t row = 0; row < TILE_SIZES[sums].rows; row++)
      for (int64_t column = 0; column < LANES; column++) {
        float parts[2] = {0, 0};
        for (int64_t k = 0; k < TILE_SIZES[b].rows; k++)
          for (int64_t i = 0; i < 2; i++)
            parts[i] = flushed(parts[i] + element(a, row, 2 * k + i) * element(b, k, 2 * column + i));
        float sum;
        memcpy(&sum, data_[sums][row] + 4 * column, 4);
        sum = flushed(sum + flushed(parts[0] + parts[1]));
        memcpy(data_[sums][row] + 4 * column, &sum, 4);
      }
  }
  float element(int tile, int64_t row, int64_t column) const {
    Bfloat16 value;
    memcpy(&value, data_[tile][row] + 2 * column, 2);
    return flushed(to_float(&value));
  }
  static float flushed(float x) { return -0x1p-126f < x && x < 0x1p-126f ? 0.f : x; }

  uint8_t data_[TILES][16][TILE_BYTES] = {};
};

#endif

#else

struct TileSizes {
  explicit TileSizes(bool) {}
};

#endif

}  // namespace
