// Compare the products of tiles of bfloat16 in neon_bf16 with the arithmetic that Arm documents for BFDOT, bit for bit.
//
//     bfdot [cases] [seed]
//
// The fuzzer of whole calls allows for any rounding of bfloat16. Here the numbers include subnormal, huge and non-finite
// ones. Run by `make arm`.
#define LANES 4
#define TILE_ROWS 8
#define BF16_DOT 1
#define NEON 1
#include "../gemm_tile.h"

#include <stdio.h>
#include <stdlib.h>

#include <cmath>
#include <random>
#include <vector>

namespace {

using Random = std::mt19937_64;

int64_t uniform(Random &random, int64_t low, int64_t high) {
  return std::uniform_int_distribution<int64_t>(low, high)(random);
}

double flushed(double x) { return std::fabs(x) < 0x1p-126 ? std::copysign(0., x) : x; }

double to_double(Bfloat16 x) { return flushed(static_cast<double>(to_float(&x))); }

// x + y for floats, rounded to odd: towards zero, with the last bit 1 if that is inexact. Subnormal sums are 0, and those
// from 2^128 on infinite.
double add_to_odd(double x, double y) {
  const double sum = x + y, back = sum - x, rest = (x - (sum - back)) + (y - back);  // sum + rest is exact
  if (!std::isfinite(sum)) return sum;
  if (std::fabs(sum) >= 0x1p128) return std::copysign(INFINITY, sum);
  float rounded = static_cast<float>(sum);
  const bool exact = rounded == sum && rest == 0;
  const double excess = (rounded - sum) - rest;
  if (std::signbit(excess) == std::signbit(sum) && excess != 0) rounded = std::nextafterf(rounded, 0);
  uint32_t bits;
  memcpy(&bits, &rounded, 4);
  bits |= !exact;
  memcpy(&rounded, &bits, 4);
  return flushed(static_cast<double>(rounded));
}

// The product of two bfloat16 is exact in float, unless it is subnormal or infinite.
double product(Bfloat16 a, Bfloat16 b) {
  const double exact = flushed(to_double(a) * to_double(b));
  return std::fabs(exact) >= 0x1p128 ? std::copysign(INFINITY, exact) : exact;
}

Bfloat16 draw(Random &random, int kind) {
  if (kind == 2 && uniform(random, 0, 40) == 0) {
    const uint16_t special[] = {0x0000, 0x8000, 0x0001, 0x807f, 0x7f80, 0xff80, 0x7fc0, 0x7f7f};
    return Bfloat16{special[uniform(random, 0, 7)]};
  }
  const auto fraction = static_cast<uint16_t>(uniform(random, 0, 127) | uniform(random, 0, 1) << 15);
  const int64_t middle = kind == 0 ? 127 : uniform(random, 0, 1) ? 95 : 160, spread = kind == 0 ? 4 : 31;
  return Bfloat16{static_cast<uint16_t>(fraction | uniform(random, middle - spread, middle + spread) << 7)};
}

// One tile of random size; returns whether all its sums are right.
bool agrees(uint64_t seed) {
  Random random(seed);
  const int kind = static_cast<int>(uniform(random, 0, 2));  // numbers near 1, of any size, or also special ones
  const int64_t depth = 2 * uniform(random, 1, 40), stride = depth + uniform(random, 0, 5);
  std::vector<Bfloat16> a(static_cast<size_t>(ROWS * stride)), b(static_cast<size_t>(depth * COLUMNS));
  for (auto *matrix : {&a, &b})
    for (Bfloat16 &x : *matrix) x = draw(random, kind);
  float sums[ROWS][COLUMNS];
  gemm_tile(a.data(), stride, b.data(), depth, [&](int64_t row, Floats left, Floats right) {
    store(sums[row], left);
    store(sums[row] + LANES, right);
  });
  for (int64_t row = 0; row < ROWS; row++)
    for (int64_t column = 0; column < COLUMNS; column++) {
      double expected = 0;
      for (int64_t k = 0; k < depth; k += 2) {
        const Bfloat16 *x = &a[static_cast<size_t>(row * stride + k)];
        const Bfloat16 *y = &b[static_cast<size_t>(k * COLUMNS + 2 * column)];
        expected = add_to_odd(expected, add_to_odd(product(x[0], y[0]), product(x[1], y[1])));
      }
      const float found = sums[row][column];
      if (found == expected || (std::isnan(found) && std::isnan(expected))) continue;
      fprintf(stderr, "Case %llu: the sum in row %ld and column %ld of depth %ld is %a, and should be %a\n",
              static_cast<unsigned long long>(seed), static_cast<long>(row), static_cast<long>(column),
              static_cast<long>(depth), static_cast<double>(found), expected);
      return false;
    }
  return true;
}

}  // namespace

int main(int count, char **arguments) {
  const uint64_t cases = count > 1 ? strtoull(arguments[1], nullptr, 10) : 2000;
  const uint64_t seed = count > 2 ? strtoull(arguments[2], nullptr, 10) : 1;
  for (uint64_t i = 0; i < cases; i++)
    if (!agrees(seed + i)) return 1;
  printf("bfdot: %llu tiles from seed %llu agree to the bit.\n", static_cast<unsigned long long>(cases),
         static_cast<unsigned long long>(seed));
  return 0;
}
