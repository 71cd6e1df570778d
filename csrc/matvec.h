// Products of few rows with unpacked keys and values, in float or bfloat16: these are bound by memory bandwidth.
#pragma once
#include "simd.h"

namespace {

constexpr int64_t DECODE_KEYS = 64;                     // per block
constexpr int64_t DECODE_STRIDE = DECODE_KEYS + LANES;  // of rows of scores: multiply_keys writes past the last key

// a b + c, rounded once where the instruction set has the instruction: left to the compiler, the rounding could differ
// from one unrolled iteration to the next.
INLINE float multiply_add(float a, float b, float c) {
#ifdef __FMA__
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

// The sums of LANES vectors, as one vector.
INLINE Floats sum_each(Floats (&c)[LANES]) {
#if LANES == 8 && defined(__AVX__)
  __m256 pairs[4], quads[2];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m256 a = (__m256)c[2 * i], b = (__m256)c[2 * i + 1];
    pairs[i] = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m256 a = pairs[2 * i], b = pairs[2 * i + 1];
    quads[i] = _mm256_add_ps(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  }
  const __m256 low = _mm256_permute2f128_ps(quads[0], quads[1], 0x20);
  return (Floats)_mm256_add_ps(low, _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
#elif LANES == 16 && defined(__AVX512F__)
  __m512 pairs[8], quads[4], halves[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m512 a = (__m512)c[2 * i], b = (__m512)c[2 * i + 1];
    pairs[i] = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512 a = pairs[2 * i], b = pairs[2 * i + 1];
    quads[i] = _mm512_add_ps(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m512 a = quads[2 * i], b = quads[2 * i + 1];
    halves[i] = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const __m512 low = _mm512_shuffle_f32x4(halves[0], halves[1], 0x88);
  return (Floats)_mm512_add_ps(low, _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
#else
  Floats sums;
  for (int64_t i = 0; i < LANES; i++) sums[i] = sum(c[i]);
  return sums;
#endif
}

// Prefetches rows that will be read next, some cache lines at each step of a loop over other data. The lines are in
// order, so that the hardware prefetcher follows. Without this, memory would be idle while scores become weights.
struct Prefetcher {
  const char *row;
  int64_t stride, bytes, count;  // bytes between rows, bytes of a row, remaining rows
  int64_t place = 0;

  template <class Element>
  Prefetcher(const Element *rows, int64_t row_stride, int64_t dim, int64_t rows_left)
      : row(reinterpret_cast<const char *>(rows)), stride(row_stride * static_cast<int64_t>(sizeof(Element))),
        bytes(dim * static_cast<int64_t>(sizeof(Element))), count(rows_left) {}

  inline __attribute__((always_inline)) void fetch(int64_t lines) {
    for (int64_t i = 0; i < lines; i++) {
      if (count <= 0) return;
      __builtin_prefetch(row + place);
      place += 64;
      if (place < bytes) continue;
      place = 0;
      row += stride;
      count--;
    }
  }
};

// Scores of COUNT rows with `count` keys, LANES dot products at a time. Up to LANES - 1 more are written after the
// last.
template <int COUNT, class Element>
INLINE void multiply_keys(const float *q, int64_t q_stride, const Element *k, int64_t k_stride, int64_t dim,
                          int64_t count, Prefetcher &prefetcher, float *scores) {
  constexpr int64_t KEYS = LANES / COUNT;  // per step
  for (int64_t key = 0; key < count; key += KEYS) {
    const Element *rows[KEYS];
#pragma GCC unroll 16
    for (int64_t i = 0; i < KEYS; i++) rows[i] = k + min(key + i, count - 1) * k_stride;
    Floats c[LANES];
#pragma GCC unroll 16
    for (int64_t i = 0; i < LANES; i++) c[i] = (Floats){};
    int64_t x = 0;
    for (; x + LANES <= dim; x += LANES) {
      prefetcher.fetch(ceil_div(KEYS * LANES, 16));
      Floats keys[KEYS];
#pragma GCC unroll 16
      for (int64_t i = 0; i < KEYS; i++) keys[i] = load(rows[i] + x);
#pragma GCC unroll 4
      for (int64_t row = 0; row < COUNT; row++) {
        const Floats query = load(q + row * q_stride + x);
#pragma GCC unroll 16
        for (int64_t i = 0; i < KEYS; i++) c[row * KEYS + i] += query * keys[i];
      }
    }
    float sums[LANES];
    store(sums, sum_each(c));
    for (; x < dim; x++)
      for (int64_t i = 0; i < LANES; i++)
        sums[i] = multiply_add(q[i / KEYS * q_stride + x], to_float(rows[i % KEYS] + x), sums[i]);
#pragma GCC unroll 4
    for (int64_t row = 0; row < COUNT; row++)
      memcpy(scores + row * DECODE_STRIDE + key, sums + row * KEYS, sizeof(float) * KEYS);
  }
}

// sums = factors * sums + weights * values for COUNT rows, over `count` keys and VECTORS vectors of columns.
template <int COUNT, int VECTORS, class Element>
INLINE void add_columns(const float *weights, const float *factors, const Element *v, int64_t stride, int64_t count,
                        Prefetcher &prefetcher, float *sums, int64_t width) {
  Floats c[COUNT][VECTORS];
#pragma GCC unroll 4
  for (int64_t row = 0; row < COUNT; row++)
#pragma GCC unroll 4
    for (int64_t i = 0; i < VECTORS; i++) c[row][i] = load(sums + row * width + i * LANES) * broadcast(factors[row]);
  for (int64_t key = 0; key < count; key++) {
    prefetcher.fetch(ceil_div(VECTORS * LANES, 16));
    Floats values[VECTORS];
#pragma GCC unroll 4
    for (int64_t i = 0; i < VECTORS; i++) values[i] = load(v + key * stride + i * LANES);
#pragma GCC unroll 4
    for (int64_t row = 0; row < COUNT; row++) {
      const Floats weight = broadcast(weights[row * DECODE_STRIDE + key]);
#pragma GCC unroll 4
      for (int64_t i = 0; i < VECTORS; i++) c[row][i] += weight * values[i];
    }
  }
#pragma GCC unroll 4
  for (int64_t row = 0; row < COUNT; row++)
#pragma GCC unroll 4
    for (int64_t i = 0; i < VECTORS; i++) store(sums + row * width + i * LANES, c[row][i]);
}

template <int COUNT, class Element>
INLINE void add_values(const float *weights, const float *factors, const Element *v, int64_t stride, int64_t count,
                       int64_t dim, Prefetcher &prefetcher, float *sums, int64_t width) {
  constexpr int VECTORS = LANES == 16 ? 4 : 2;  // as many as fit into the registers
  int64_t x = 0;
  for (; x + VECTORS * LANES <= dim; x += VECTORS * LANES)
    add_columns<COUNT, VECTORS>(weights, factors, v + x, stride, count, prefetcher, sums + x, width);
  for (; x + LANES <= dim; x += LANES)
    add_columns<COUNT, 1>(weights, factors, v + x, stride, count, prefetcher, sums + x, width);
  for (; x < dim; x++)
    for (int64_t row = 0; row < COUNT; row++) {
      float total = sums[row * width + x] * factors[row];
      for (int64_t key = 0; key < count; key++)
        total += weights[row * DECODE_STRIDE + key] * to_float(v + key * stride + x);
      sums[row * width + x] = total;
    }
}

// Call body.template run<COUNT>(row) for 4, 2 or 1 rows at a time.
template <class Body>
INLINE void for_rows(int64_t count, Body body) {
  int64_t row = 0;
  for (; row + 4 <= count; row += 4) body.template run<4>(row);
  if (row + 2 <= count) {
    body.template run<2>(row);
    row += 2;
  }
  if (row < count) body.template run<1>(row);
}

// Whether `count` rows of `dim` elements are finite throughout.
INLINE bool rows_finite(const float *from, int64_t stride, int64_t count, int64_t dim, Prefetcher &prefetcher) {
  Floats zeros[8] = {};  // enough independent chains of additions to hide their latency
  bool good = true;
  for (int64_t row = 0; row < count; row += 2) {
    prefetcher.fetch(ceil_div(dim, 32));
    const float *even = from + row * stride, *odd = row + 1 < count ? even + stride : even;
    int64_t x = 0;
    for (; x + 4 * LANES <= dim; x += 4 * LANES)
#pragma GCC unroll 4
      for (int64_t i = 0; i < 4; i++) {
        zeros[2 * i] += load(even + x + i * LANES) * broadcast(0.f);
        zeros[2 * i + 1] += load(odd + x + i * LANES) * broadcast(0.f);
      }
    for (; x < dim; x++) good &= finite(even[x]) && finite(odd[x]);
  }
  Floats all = (Floats){};
#pragma GCC unroll 8
  for (int64_t i = 0; i < 8; i++) all += zeros[i];
  return good && sum(all) == 0;
}
template <class Half>
INLINE bool rows_finite(const Half *from, int64_t stride, int64_t count, int64_t dim, Prefetcher &prefetcher) {
  typedef uint16_t Sizes __attribute__((vector_size(LANES * 4)));
  Sizes largest = (Sizes){};  // absolute value; NaN is above infinity
  bool good = true;
  for (int64_t row = 0; row < count; row++, from += stride) {
    prefetcher.fetch(ceil_div(dim, 128));
    int64_t x = 0;
    for (; x + 2 * LANES <= dim; x += 2 * LANES) {
      const Sizes size = load_as<Sizes>(from + x) & 0x7fff;
      largest = size > largest ? size : largest;
    }
    for (; x < dim; x++) good &= (from[x].bits & 0x7fff) < Half::INFINITY_BITS;
  }
  for (int lane = 0; lane < 2 * LANES; lane++) good &= largest[lane] < Half::INFINITY_BITS;
  return good;
}

}  // namespace
