// Register tiles of matrix products: TILE_ROWS rows by two vectors of columns stay in registers over the whole depth.
#pragma once
#include "lanes.h"

namespace {

constexpr int64_t ROWS = TILE_ROWS, COLUMNS = 2 * LANES;  // of a register tile

// C = A B of one tile. A is (ROWS, depth) with rows `stride` apart, or its transpose where TRANSPOSED;
// B is a panel (depth, COLUMNS), or has rows `b_stride` apart. end(row, left, right) gets each row of C as two vectors.
template <bool TRANSPOSED, class End>
INLINE void product(const float *a, int64_t stride, const float *b, int64_t depth, End end, int64_t b_stride = COLUMNS) {
  Floats c[ROWS][2];
#pragma GCC unroll 16
  for (int64_t row = 0; row < ROWS; row++) c[row][0] = c[row][1] = (Floats){};
  for (int64_t k = 0; k < depth; k++) {
    const Floats left = load(b + k * b_stride), right = load(b + k * b_stride + LANES);
#pragma GCC unroll 16
    for (int64_t row = 0; row < ROWS; row++) {
      const Floats x = broadcast(TRANSPOSED ? a[k * stride + row] : a[row * stride + k]);
      c[row][0] += x * left;
      c[row][1] += x * right;
    }
  }
#pragma GCC unroll 16
  for (int64_t row = 0; row < ROWS; row++) end(row, c[row][0], c[row][1]);
}

#if BF16_DOT
// Add the products of pairs of bfloat16, in float.
INLINE Floats add_pairs(Floats sum, Words a, Words b) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else  // the same numbers where the instruction is missing, so that the form can be tested everywhere
  sum += (Floats)(a << 16) * (Floats)(b << 16);
  return sum + (Floats)(a & 0xffff0000u) * (Floats)(b & 0xffff0000u);
#endif
}

// The same product of bfloat16: A (ROWS, depth), depth even; B a panel (depth / 2, COLUMNS, 2), pairs beside each other.
template <class End>
INLINE void product(const Bfloat16 *a, int64_t stride, const Bfloat16 *b, int64_t depth, End end) {
  Floats c[ROWS][2];
#pragma GCC unroll 16
  for (int64_t row = 0; row < ROWS; row++) c[row][0] = c[row][1] = (Floats){};
  for (int64_t k = 0; k < depth; k += 2) {
    const Words left = read<Words>(b + k * COLUMNS), right = read<Words>(b + k * COLUMNS + 2 * LANES);
#pragma GCC unroll 16
    for (int64_t row = 0; row < ROWS; row++) {
      uint32_t pair;
      memcpy(&pair, a + row * stride + k, 4);
      const Words x = pair - (Words){};
      c[row][0] = add_pairs(c[row][0], x, left);
      c[row][1] = add_pairs(c[row][1], x, right);
    }
  }
#pragma GCC unroll 16
  for (int64_t row = 0; row < ROWS; row++) end(row, c[row][0], c[row][1]);
}
#endif

}  // namespace
