// Matrix product of one register tile: TILE_ROWS rows by two vectors of columns, accumulated in registers.
#pragma once
#include "simd.h"
#include "tile_registers.h"

namespace {

constexpr int64_t ROWS = TILE_ROWS, COLUMNS = 2 * LANES;  // of a register tile

#if NEON
// sums + factors[lane] * vector: of floats, or of pairs of bfloat16. BFDOT adds the products of a pair, then their sum to
// `sums`; both sums are rounded to odd, and subnormal numbers count as 0.
INLINE Floats add_multiple(Floats sums, Floats vector, Floats factors, int lane) {
  const float32x4_t c = (float32x4_t)sums, b = (float32x4_t)vector, a = (float32x4_t)factors;
  switch (lane) {
    case 0: return (Floats)vfmaq_laneq_f32(c, b, a, 0);
    case 1: return (Floats)vfmaq_laneq_f32(c, b, a, 1);
    case 2: return (Floats)vfmaq_laneq_f32(c, b, a, 2);
    default: return (Floats)vfmaq_laneq_f32(c, b, a, 3);
  }
}
#if BF16_DOT
INLINE Floats add_multiple(Floats sums, Words vector, Words factors, int lane) {
  const float32x4_t c = (float32x4_t)sums;
  const bfloat16x8_t b = (bfloat16x8_t)vector, a = (bfloat16x8_t)factors;
  switch (lane) {
    case 0: return (Floats)vbfdotq_laneq_f32(c, b, a, 0);
    case 1: return (Floats)vbfdotq_laneq_f32(c, b, a, 1);
    case 2: return (Floats)vbfdotq_laneq_f32(c, b, a, 2);
    default: return (Floats)vbfdotq_laneq_f32(c, b, a, 3);
  }
}
#endif

// C += A B, as gemm_tile, over `depth` floats or pairs of bfloat16: the lanes of a Vector. A lane of A multiplies a vector of
// B in one instruction, so A is loaded in vectors: of its rows, or where TRANSPOSED, of the rows of its transpose.
template <bool TRANSPOSED, class Vector, int64_t COUNT, int HALVES, class Element>
INLINE void add_products(const Element *a, int64_t stride, const Element *b, int64_t b_stride, int64_t depth,
                         Floats (&c)[COUNT][HALVES]) {
  constexpr int64_t LANE = sizeof(float) / sizeof(Element);  // elements
  constexpr int64_t STEPS = TRANSPOSED ? 1 : LANES, VECTORS = TRANSPOSED ? COUNT / LANES : COUNT;
  static_assert(!TRANSPOSED || (COUNT % LANES == 0 && LANE == 1), "rows of the transpose are whole vectors");
  const auto add_row = [&](int64_t row, const Element *from, Vector factors, int lane) __attribute__((always_inline)) {
#pragma GCC unroll 2
    for (int half = 0; half < HALVES; half++)
      c[row][half] = add_multiple(c[row][half], load_as<Vector>(from + half * LANES * LANE), factors, lane);
  };
  int64_t k = 0;
  for (; k + STEPS <= depth; k += STEPS) {
    Vector x[VECTORS];
#pragma GCC unroll 16
    for (int64_t i = 0; i < VECTORS; i++) {
      Vector loaded = load_as<Vector>(TRANSPOSED ? a + k * stride + i * LANES : a + i * stride + k * LANE);
      __asm__("" : "+w"(loaded));  // in a register: GCC loads its lanes one by one otherwise
      x[i] = loaded;
    }
#pragma GCC unroll 4
    for (int step = 0; step < STEPS; step++)
#pragma GCC unroll 16
      for (int64_t row = 0; row < COUNT; row++)
        add_row(row, b + (k + step) * b_stride, x[TRANSPOSED ? row / LANES : row], TRANSPOSED ? row % LANES : step);
  }
#pragma GCC unroll 1
  for (; k < depth; k++)
#pragma GCC unroll 16
    for (int64_t row = 0; row < COUNT; row++)
      add_row(row, b + k * b_stride, (Vector)vdupq_n_u32(load_as<uint32_t>(a + row * stride + k * LANE)), 0);
}
#endif

// C = A B of one tile. A is (COUNT, depth) with row stride `stride`, or its transpose where TRANSPOSED; B is a panel
// (depth, COLUMNS) with row stride `b_stride`. Each row of C is passed to epilogue(row, left, right) as two vectors. With
// HALVES = 1 only the left vector is computed, and passed twice.
template <bool TRANSPOSED, int64_t COUNT = ROWS, int HALVES = 2, class Epilogue>
INLINE void gemm_tile(const float *a, int64_t stride, const float *b, int64_t depth, Epilogue epilogue,
                      int64_t b_stride = COLUMNS) {
  Floats c[COUNT][HALVES];
#pragma GCC unroll 16
  for (int64_t row = 0; row < COUNT; row++)
    for (int half = 0; half < HALVES; half++) c[row][half] = (Floats){};
#if NEON
  add_products<TRANSPOSED, Floats>(a, stride, b, b_stride, depth, c);
#else
  for (int64_t k = 0; k < depth; k++) {
    const Floats left = load(b + k * b_stride), right = HALVES == 2 ? load(b + k * b_stride + LANES) : left;
#pragma GCC unroll 16
    for (int64_t row = 0; row < COUNT; row++) {
      const Floats x = broadcast(TRANSPOSED ? a[k * stride + row] : a[row * stride + k]);
      c[row][0] += x * left;
      if (HALVES == 2) c[row][1] += x * right;
    }
  }
#endif
#pragma GCC unroll 16
  for (int64_t row = 0; row < COUNT; row++) epilogue(row, c[row][0], c[row][HALVES - 1]);
}

#if BF16_DOT && !AMX
constexpr int64_t PAIRED_DEPTH = 2;  // the depth of a product of bfloat16 is a multiple of it

#if !NEON
// sum + a[0] b[0] + a[1] b[1] for pairs of bfloat16, accumulated in float.
INLINE Floats add_pairs(Floats sum, Words a, Words b) {
#ifdef __AVX512BF16__
  return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#else  // the same arithmetic without the instruction, so that it can be tested on every CPU
  sum += (Floats)(a << 16) * (Floats)(b << 16);
  return sum + (Floats)(a & 0xffff0000u) * (Floats)(b & 0xffff0000u);
#endif
}
#endif

// The same for bfloat16: A is (ROWS, depth), B a panel (depth / 2, COLUMNS, 2) of adjacent pairs.
template <class Epilogue>
INLINE void gemm_tile(const Bfloat16 *a, int64_t stride, const Bfloat16 *b, int64_t depth, Epilogue epilogue) {
  Floats c[ROWS][2];
#pragma GCC unroll 16
  for (int64_t row = 0; row < ROWS; row++) c[row][0] = c[row][1] = (Floats){};
#if NEON
  add_products<false, Words>(a, stride, b, 2 * COLUMNS, depth / 2, c);
#else
  for (int64_t k = 0; k < depth; k += 2) {
    const Words left = load_as<Words>(b + k * COLUMNS), right = load_as<Words>(b + k * COLUMNS + 2 * LANES);
#pragma GCC unroll 16
    for (int64_t row = 0; row < ROWS; row++) {
      uint32_t pair;
      memcpy(&pair, a + row * stride + k, 4);
      const Words x = pair - (Words){};
      c[row][0] = add_pairs(c[row][0], x, left);
      c[row][1] = add_pairs(c[row][1], x, right);
    }
  }
#endif
#pragma GCC unroll 16
  for (int64_t row = 0; row < ROWS; row++) epilogue(row, c[row][0], c[row][1]);
}
#elif BF16_DOT
constexpr int64_t PAIRED_DEPTH = TileRegisters::DEPTH;

// The same on tile registers.
template <class Epilogue>
INLINE void gemm_tile(const Bfloat16 *a, int64_t stride, const Bfloat16 *b, int64_t depth, Epilogue epilogue) {
  TileRegisters tiles;
  for (int64_t k = 0; k < depth; k += PAIRED_DEPTH)
    tiles.add_product(a + k, stride, b + k * COLUMNS, b + k * COLUMNS + 2 * LANES, 2 * COLUMNS);
  alignas(64) float left[ROWS * LANES], right[ROWS * LANES];
  tiles.store(left, right);
  for (int64_t row = 0; row < ROWS; row++) epilogue(row, load(left + row * LANES), load(right + row * LANES));
}
#else
constexpr int64_t PAIRED_DEPTH = 1;
#endif

}  // namespace
