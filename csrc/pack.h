// Copy matrices into the memory order in which register tiles read them, and detect non-finite elements.
//
// Non-finite elements are handled key by key: packing turns the scores of such a key into NaN and its value into 0. So
// a query that sees the key becomes NaN by its score, and no other query is affected.
#pragma once
#include "simd.h"
#include "gemm_tile.h"

namespace {

// ---------------------------------------------------------------- transposes of LANES x LANES words

#if LANES == 8 && defined(__AVX2__)
constexpr bool TRANSPOSES = true;
INLINE void transpose(Floats (&rows)[LANES]) {
  __m256 a[8], b[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i += 2) {
    a[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
    a[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 8; i += 4) {
    b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    rows[i] = (Floats)_mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
    rows[i + 4] = (Floats)_mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
  }
}
#elif LANES == 16 && defined(__AVX512F__)
constexpr bool TRANSPOSES = true;
INLINE void transpose(Floats (&rows)[LANES]) {
  __m512 a[16], b[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i += 2) {  // pairs of rows, then quads: then each 128-bit part holds one column of four rows
    a[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
    a[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
    b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
    b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
    b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {  // b[i + 4 q] holds columns i, i + 4, i + 8, i + 12 of rows 4 q .. 4 q + 3
    const __m512 low = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88);
    const __m512 high = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
    const __m512 odd_low = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
    const __m512 odd_high = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
    rows[i] = (Floats)_mm512_shuffle_f32x4(low, high, 0x88);
    rows[i + 8] = (Floats)_mm512_shuffle_f32x4(low, high, 0xdd);
    rows[i + 4] = (Floats)_mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
    rows[i + 12] = (Floats)_mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
  }
}
#elif NEON
constexpr bool TRANSPOSES = true;
INLINE void transpose(Floats (&rows)[LANES]) {
  float32x4_t even[2], odd[2];  // columns 0 and 2, or 1 and 3, of two rows
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    even[i] = vtrn1q_f32((float32x4_t)rows[2 * i], (float32x4_t)rows[2 * i + 1]);
    odd[i] = vtrn2q_f32((float32x4_t)rows[2 * i], (float32x4_t)rows[2 * i + 1]);
  }
  rows[0] = (Floats)vtrn1q_f64((float64x2_t)even[0], (float64x2_t)even[1]);
  rows[1] = (Floats)vtrn1q_f64((float64x2_t)odd[0], (float64x2_t)odd[1]);
  rows[2] = (Floats)vtrn2q_f64((float64x2_t)even[0], (float64x2_t)even[1]);
  rows[3] = (Floats)vtrn2q_f64((float64x2_t)odd[0], (float64x2_t)odd[1]);
}
#else
constexpr bool TRANSPOSES = false;
INLINE void transpose(Floats (&)[LANES]) {}
#endif

// ---------------------------------------------------------------- panels of floats

// Transpose a matrix (rows, dim) into panels (dim, COLUMNS) of COLUMNS rows each, with rows of 0 up to `padded`, a
// multiple of COLUMNS.
template <class Element>
void pack_transposed(const Element *from, int64_t stride, int64_t rows, int64_t padded, int64_t dim, float *to) {
  for (int64_t first = 0; first < padded; first += COLUMNS) {
    float *panel = to + first * dim;
    int64_t done = 0;
    if (TRANSPOSES)
      for (; done + LANES <= dim; done += LANES)
        for (int64_t half = 0; half < COLUMNS; half += LANES) {
          Floats block[LANES];
          const int64_t row = first + half;
          if (row + LANES <= rows) {
#pragma GCC unroll 16
            for (int64_t i = 0; i < LANES; i++) block[i] = load(from + (row + i) * stride + done);
          } else {
            for (int64_t i = 0; i < LANES; i++)
              block[i] = row + i < rows ? load(from + (row + i) * stride + done) : (Floats){};
          }
          transpose(block);
#pragma GCC unroll 16
          for (int64_t i = 0; i < LANES; i++) store(panel + (done + i) * COLUMNS + half, block[i]);
        }
    for (int64_t i = 0; i < COLUMNS; i++)
      for (int64_t x = done; x < dim; x++)
        panel[x * COLUMNS + i] = first + i < rows ? to_float(from + (first + i) * stride + x) : 0.f;
  }
}

// Copy a matrix (rows, dim) into panels (padded, COLUMNS) of COLUMNS columns each, which begin `panel_stride` floats
// apart; missing rows and columns are 0.
template <class Element>
void pack_panels(const Element *from, int64_t stride, int64_t rows, int64_t padded, int64_t dim, float *to,
                 int64_t panel_stride) {
  for (int64_t column = 0; column < dim; column += COLUMNS) {
    float *panel = to + column / COLUMNS * panel_stride;
    const int64_t width = min(COLUMNS, dim - column);
    for (int64_t row = 0; row < padded; row++, panel += COLUMNS) {
      const Element *source = from + row * stride + column;
      if (row < rows && width == COLUMNS) {
        store(panel, load(source));
        store(panel + LANES, load(source + LANES));
      } else {
        for (int64_t x = 0; x < COLUMNS; x++) panel[x] = row < rows && x < width ? to_float(source + x) : 0.f;
      }
    }
  }
}

// Copy a row of `dim` elements as floats times a factor, with zeros up to `padded`. A row with an element that is not
// finite becomes NaN as a whole.
template <class Element>
INLINE void pack_row(const Element *from, int64_t dim, int64_t padded, float factor, float *to) {
  Floats zeros = (Floats){};
  float zero = 0;
  int64_t x = 0;
  for (; x + LANES <= dim; x += LANES) {
    const Floats value = load(from + x);
    zeros += value * broadcast(0.f);
    store(to + x, value * broadcast(factor));
  }
  for (; x < dim; x++) {
    const float value = to_float(from + x);
    zero += value * 0.f;
    to[x] = value * factor;
  }
  for (; x < padded; x++) to[x] = 0;
  if (!(sum(zeros) + zero == 0))
    for (x = 0; x < dim; x++) to[x] = NOT_A_NUMBER;
}

// Copy rows of `dim` elements as floats, with zeros up to `padded`. Returns whether all are finite.
template <class Element>
INLINE bool copy_rows(const Element *from, int64_t stride, int64_t rows, int64_t dim, int64_t padded, float *to,
                      int64_t to_stride) {
  Ints bits = (Ints){};  // of the elements times 0, which is 0 or NaN
  float zero = 0;
  for (int64_t row = 0; row < rows; row++, from += stride, to += to_stride) {
    int64_t x = 0;
    for (; x + LANES <= dim; x += LANES) {
      const Floats value = load(from + x);
      bits |= (Ints)(value * broadcast(0.f));
      store(to + x, value);
    }
    for (; x < dim; x++) zero += (to[x] = to_float(from + x)) * 0.f;
    for (; x < padded; x++) to[x] = 0;
  }
  return !any(bits & 0x7fffffff) && zero == 0;
}

// Write a row of floats times a factor; zeros for null.
template <class Element>
INLINE void write_row(const float *from, int64_t dim, float factor, Element *to) {
  if (!from) {
    memset(static_cast<void *>(to), 0, static_cast<size_t>(dim) * sizeof(Element));
    return;
  }
  int64_t x = 0;
  for (; x + LANES <= dim; x += LANES) store(to + x, load(from + x) * broadcast(factor));
  for (; x < dim; x++) store_element(to + x, from[x] * factor);
}

// ---------------------------------------------------------------- non-finite elements

// Whether `count` floats (a multiple of LANES) are all finite.
INLINE bool all_finite(const float *from, int64_t count) {
  Floats zeros = (Floats){};
  for (int64_t i = 0; i < count; i += LANES) zeros += load(from + i) * broadcast(0.f);
  return sum(zeros) == 0;
}
// Whether a row of `count` elements is finite throughout.
INLINE bool row_finite(const float *from, int64_t count) {
  for (int64_t x = 0; x < count; x++)
    if (!finite(from[x])) return false;
  return true;
}
template <class Half>
INLINE bool row_finite(const Half *from, int64_t count) {
  for (int64_t x = 0; x < count; x++)
    if ((from[x].bits & 0x7fff) >= Half::INFINITY_BITS) return false;
  return true;
}
INLINE bool row_finite(const Int8 *, int64_t) { return true; }
// Replace non-finite elements among `count` floats (a multiple of LANES) by 0.
INLINE void zero_nonfinite(float *values, int64_t count) {
  for (int64_t i = 0; i < count; i += LANES) {
    const Floats value = load(values + i);
    store(values + i, select(value - value == (Floats){}, value, (Floats){}));
  }
}

#if BF16_DOT
// ---------------------------------------------------------------- panels of pairs of bfloat16, for add_pairs

INLINE uint32_t pair(Bfloat16 low, Bfloat16 high) { return low.bits | (uint32_t)high.bits << 16; }

// As above, but a panel is (depth / 2, COLUMNS, 2), where the depth is dim, padded with 0 to a multiple of PAIRED_DEPTH.
INLINE void pack_transposed(const Bfloat16 *from, int64_t stride, int64_t rows, int64_t padded, int64_t dim,
                            Bfloat16 *to) {
  const int64_t depth = round_up(dim, PAIRED_DEPTH);
  for (int64_t first = 0; first < padded; first += COLUMNS) {
    Bfloat16 *panel = to + first * depth;
    int64_t done = 0;
    if (TRANSPOSES)
      for (; done + 2 * LANES <= dim; done += 2 * LANES)
        for (int64_t half = 0; half < COLUMNS; half += LANES) {
          Floats block[LANES];  // of pairs
          const int64_t row = first + half;
          for (int64_t i = 0; i < LANES; i++)
            block[i] = row + i < rows ? load_as<Floats>(from + (row + i) * stride + done) : (Floats){};
          transpose(block);
#pragma GCC unroll 16
          for (int64_t i = 0; i < LANES; i++)
            __builtin_memcpy(panel + (done + 2 * i) * COLUMNS + 2 * half, &block[i], sizeof block[i]);
        }
    for (int64_t i = 0; i < COLUMNS; i++)
      for (int64_t x = done; x < depth; x++) {
        const bool inside = first + i < rows && x < dim;
        panel[x / 2 * 2 * COLUMNS + 2 * i + x % 2] = inside ? from[(first + i) * stride + x] : Bfloat16{0};
      }
  }
}

// As above, but a panel is (padded / 2, COLUMNS, 2), which pairs adjacent rows.
INLINE void pack_panels(const Bfloat16 *from, int64_t stride, int64_t rows, int64_t padded, int64_t dim, Bfloat16 *to,
                        int64_t panel_stride) {
  for (int64_t column = 0; column < dim; column += COLUMNS) {
    Bfloat16 *panel = to + column / COLUMNS * panel_stride;
    const int64_t width = min(COLUMNS, dim - column);
    for (int64_t row = 0; row < padded; row += 2, panel += 2 * COLUMNS) {
      const Bfloat16 *source = from + row * stride + column;
      if (row + 1 < rows && width == COLUMNS) {
        for (int64_t half = 0; half < COLUMNS; half += LANES) {
          const Words low = widen(load_as<Halves>(source + half));
          const Words high = widen(load_as<Halves>(source + stride + half));
          const Words both = low | high << 16;
          __builtin_memcpy(panel + 2 * half, &both, sizeof both);
        }
      } else {
        for (int64_t x = 0; x < COLUMNS; x++) {
          panel[2 * x] = row < rows && x < width ? source[x] : Bfloat16{0};
          panel[2 * x + 1] = row + 1 < rows && x < width ? source[stride + x] : Bfloat16{0};
        }
      }
    }
  }
}

// Copy a row of `dim` elements, with zeros up to `padded`; NaN as a whole if an element is not finite.
INLINE void pack_row(const Bfloat16 *from, int64_t dim, int64_t padded, Bfloat16 *to) {
  memcpy(static_cast<void *>(to), from, sizeof(Bfloat16) * static_cast<size_t>(dim));
  for (int64_t x = dim; x < padded; x++) to[x] = Bfloat16{0};
  Floats zeros = (Floats){};
  int64_t x = 0;
  for (; x + LANES <= dim; x += LANES) zeros += load(from + x) * broadcast(0.f);
  if (sum(zeros) == 0 && row_finite(from + x, dim - x)) return;
  for (x = 0; x < dim; x++) to[x] = Bfloat16{0x7fc0};
}

INLINE bool all_finite(const Bfloat16 *from, int64_t count) {  // a multiple of 2 * LANES
  Floats zeros = (Floats){};
  for (int64_t i = 0; i < count; i += 2 * LANES) {
    const Words pairs = load_as<Words>(from + i);
    zeros += (Floats)(pairs << 16) * broadcast(0.f);
    zeros += (Floats)(pairs & 0xffff0000u) * broadcast(0.f);
  }
  return sum(zeros) == 0;
}
#endif

}  // namespace
