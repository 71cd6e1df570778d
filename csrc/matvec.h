// Products of few rows with unpacked keys and values, in float, bfloat16 or int8: these are bound by memory bandwidth.
#pragma once
#include "simd.h"

namespace {

constexpr int64_t DECODE_KEYS = 64;                     // per block
constexpr int64_t DECODE_STRIDE = DECODE_KEYS + LANES;  // of rows of scores: multiply_keys writes past the last key

// a b + c, rounded once where the instruction set has the instruction: left to the compiler, the rounding could differ
// from one unrolled iteration to the next.
INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

INLINE int32_t sum(Ints x) {
#if NEON
  return vaddvq_s32((int32x4_t)x);
#else
  int32_t total = 0;
  for (int64_t lane = 0; lane < LANES; lane++) total += x[lane];
  return total;
#endif
}

#if NEON
INLINE Floats add_adjacent(Floats a, Floats b) { return (Floats)vpaddq_f32((float32x4_t)a, (float32x4_t)b); }
INLINE Ints add_adjacent(Ints a, Ints b) { return (Ints)vpaddq_s32((int32x4_t)a, (int32x4_t)b); }
#endif

// The sums of LANES vectors of floats or integers, as one vector.
template <class Vector>
INLINE Vector sum_each(Vector (&c)[LANES]) {
#if LANES == 8 && defined(__AVX__)
  __m256 pairs[4], quads[2];
  const auto add = [](__m256 a, __m256 b) __attribute__((always_inline)) { return (__m256)((Vector)a + (Vector)b); };
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m256 a = (__m256)c[2 * i], b = (__m256)c[2 * i + 1];
    pairs[i] = add(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m256 a = pairs[2 * i], b = pairs[2 * i + 1];
    quads[i] = add(_mm256_shuffle_ps(a, b, 0x44), _mm256_shuffle_ps(a, b, 0xee));
  }
  const __m256 low = _mm256_permute2f128_ps(quads[0], quads[1], 0x20);
  return (Vector)add(low, _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
#elif LANES == 16 && defined(__AVX512F__)
  __m512 pairs[8], quads[4], halves[2];
  const auto add = [](__m512 a, __m512 b) __attribute__((always_inline)) { return (__m512)((Vector)a + (Vector)b); };
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    const __m512 a = (__m512)c[2 * i], b = (__m512)c[2 * i + 1];
    pairs[i] = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512 a = pairs[2 * i], b = pairs[2 * i + 1];
    quads[i] = add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m512 a = quads[2 * i], b = quads[2 * i + 1];
    halves[i] = add(_mm512_shuffle_f32x4(a, b, 0x88), _mm512_shuffle_f32x4(a, b, 0xdd));
  }
  const __m512 low = _mm512_shuffle_f32x4(halves[0], halves[1], 0x88);
  return (Vector)add(low, _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
#elif NEON
  return add_adjacent(add_adjacent(c[0], c[1]), add_adjacent(c[2], c[3]));
#else
  Vector sums;
  for (int64_t i = 0; i < LANES; i++) sums[i] = sum(c[i]);
  return sums;
#endif
}
INLINE Floats as_floats(Floats x) { return x; }
INLINE Floats as_floats(Ints x) { return __builtin_convertvector(x, Floats); }

// ---------------------------------------------------------------- elements as floats, two vectors at a time

// Two vectors of elements. Those of bfloat16 are in another order, the even elements before the odd ones, because two
// of them share a word and need no shuffle then; `reorder_row` converts rows of floats.
INLINE void load_two(const float *from, Floats &first, Floats &second) {
  first = load(from);
  second = load(from + LANES);
}
INLINE void load_two(const Bfloat16 *from, Floats &even, Floats &odd) {
  const Words words = load_as<Words>(from);
  even = (Floats)(words << 16);
  odd = (Floats)(words & 0xffff0000u);
}
INLINE void load_two(const Float16 *from, Floats &first, Floats &second) {
  first = load(from);
  second = load(from + LANES);
}
INLINE void load_two(const Int8 *from, Floats &first, Floats &second) {
  first = load(from);
  second = load(from + LANES);
}

// 2 * LANES elements of int8 as int16, two in each lane; and sum + a[0] b[0] + a[1] b[1] for such pairs.
INLINE Ints load_int16(const Int8 *from) {
#if LANES == 16 && defined(__AVX512BW__)
  return (Ints)_mm512_cvtepi8_epi16(load_as<__m256i>(from));
#elif LANES == 8 && defined(__AVX2__)
  return (Ints)_mm256_cvtepi8_epi16(load_as<__m128i>(from));
#elif NEON
  return (Ints)vmovl_s8(load_as<int8x8_t>(from));
#else
  typedef int8_t Narrow __attribute__((vector_size(2 * LANES)));
  typedef int16_t Wide __attribute__((vector_size(4 * LANES)));
  return (Ints)__builtin_convertvector(load_as<Narrow>(from), Wide);
#endif
}
INLINE Ints add_int16_pairs(Ints sum, Ints a, Ints b) {
#if LANES == 16 && defined(__AVX512VNNI__)
  return (Ints)_mm512_dpwssd_epi32((__m512i)sum, (__m512i)a, (__m512i)b);
#elif LANES == 16 && defined(__AVX512BW__)
  return sum + (Ints)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif LANES == 8 && defined(__AVX2__)
  return sum + (Ints)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif NEON  // of the lower and the upper elements instead of adjacent ones: the caller adds all lanes
  const int16x8_t x = (int16x8_t)a, y = (int16x8_t)b;
  return (Ints)vmlal_high_s16(vmlal_s16((int32x4_t)sum, vget_low_s16(x), vget_low_s16(y)), x, y);
#else
  return sum + (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Pairs of int16, of two rows of 2 * LANES elements of int8: two vectors, see PAIRED_VALUES.
#if LANES == 16 && defined(__AVX512BW__)
INLINE void load_pairs(const Int8 *first, const Int8 *second, Ints &low, Ints &high) {
  const __m512i a = (__m512i)load_int16(first), b = (__m512i)load_int16(second);
  low = (Ints)_mm512_unpacklo_epi16(a, b);
  high = (Ints)_mm512_unpackhi_epi16(a, b);
}
constexpr bool HAS_PAIRS = true;
#else
INLINE void load_pairs(const Int8 *, const Int8 *, Ints &, Ints &) {}
constexpr bool HAS_PAIRS = false;
#endif

// The order in which two vectors of a row are loaded: as they are stored; the even elements before the odd ones; or the
// first four of each eight before the others.
enum class Order { STORED, EVEN_FIRST, FOURS };
template <class Element>
constexpr Order ORDER = Order::STORED;
template <>
constexpr Order ORDER<Bfloat16> = Order::EVEN_FIRST;
template <>
constexpr Order ORDER<Int8> = HAS_PAIRS ? Order::FOURS : Order::STORED;

// Place of element x of a row in that order, if STEP elements are loaded at once; the rest of a row, less than STEP
// elements, keeps its order.
template <class Element, int64_t STEP = 2 * LANES>
INLINE int64_t loading_place(int64_t x, int64_t dim) {
  if (x >= dim / STEP * STEP) return x;
  switch (ORDER<Element>) {
    case Order::STORED: return x;
    case Order::EVEN_FIRST: return x / STEP * STEP + x % 2 * (STEP / 2) + x % STEP / 2;
    case Order::FOURS: return x / STEP * STEP + x % 8 / 4 * (STEP / 2) + x % STEP / 8 * 4 + x % 4;
  }
  return x;
}

// Convert a row of floats to the order in which elements are loaded, or back.
template <class Element, bool BACK, int64_t STEP = 2 * LANES>
void reorder_row(int64_t dim, float *row) {
  if (ORDER<Element> == Order::STORED) return;
  for (int64_t x = 0; x + STEP <= dim; x += STEP) {
    float copy[STEP];
    memcpy(copy, row + x, sizeof copy);
    for (int64_t i = 0; i < STEP; i++) {
      const int64_t place = loading_place<Element, STEP>(i, STEP);
      if (BACK) row[x + i] = copy[place];
      else row[x + place] = copy[i];
    }
  }
}

// ---------------------------------------------------------------- prefetching

// Prefetches rows that will be read next, some at each step of a loop over other data, so that memory is not idle while
// scores become weights. Whole rows in their order, so that the hardware prefetcher follows. For data in memory, the row
// that is `ahead` is prefetched into the L2 cache too: the queue of the L1 cache is too short for the latency of memory.
// For data in a cache this would only take time.
struct Prefetcher {
  const char *row;
  int64_t stride, bytes, count;  // bytes between rows, bytes of a row, remaining rows
  int64_t ahead;                 // in bytes, or 0

  template <class Element>
  Prefetcher(const Element *rows, int64_t row_stride, int64_t dim, int64_t rows_left, int64_t rows_ahead)
      : row(reinterpret_cast<const char *>(rows)), stride(row_stride * static_cast<int64_t>(sizeof(Element))),
        bytes(dim * static_cast<int64_t>(sizeof(Element))), count(rows_left), ahead(rows_ahead * stride) {}

  inline __attribute__((always_inline)) void fetch(int64_t rows) {
    for (; rows > 0 && count > 0; rows--, count--, row += stride)
      for (int64_t place = 0; place < bytes; place += 64) {
        __builtin_prefetch(row + place);
        if (ahead) __builtin_prefetch(row + place + ahead, 0, 2);
      }
  }
};

// ---------------------------------------------------------------- products

// Scores of COUNT rows with `count` keys, some dot products at a time. Up to LANES - 1 more are written after the last.
// The rows of q are in the order of `load_two`, or in int16 for keys in int8; Products are vectors of the sums.
template <int COUNT, class Products, class Query, class Element>
INLINE void multiply_keys(const Query *q, int64_t q_stride, const Element *k, int64_t k_stride, int64_t dim,
                          int64_t count, Prefetcher &prefetcher, float *scores) {
  constexpr int64_t KEYS = LANES / (COUNT == 3 ? 4 : COUNT);  // per step
  const int64_t rows_per_step = ceil_div(KEYS * 2 * LANES, max(dim, 1));
  for (int64_t key = 0; key < count; key += KEYS) {
    const Element *rows[KEYS];
#pragma GCC unroll 16
    for (int64_t i = 0; i < KEYS; i++) rows[i] = k + min(key + i, count - 1) * k_stride;
    Products c[LANES];
#pragma GCC unroll 16
    for (int64_t i = 0; i < LANES; i++) c[i] = (Products){};
    int64_t x = 0;
    for (; x + 2 * LANES <= dim; x += 2 * LANES) {
      prefetcher.fetch(rows_per_step);
      if constexpr (sizeof(Query) == 2) {
        Ints pairs[COUNT];
#pragma GCC unroll 4
        for (int64_t row = 0; row < COUNT; row++) pairs[row] = load_as<Ints>(q + row * q_stride + x);
#pragma GCC unroll 16
        for (int64_t i = 0; i < KEYS; i++) {
          const Ints keys = load_int16(rows[i] + x);
#pragma GCC unroll 4
          for (int64_t row = 0; row < COUNT; row++)
            c[row * KEYS + i] = add_int16_pairs(c[row * KEYS + i], pairs[row], keys);
        }
      } else {
        Floats first[COUNT], second[COUNT];
#pragma GCC unroll 4
        for (int64_t row = 0; row < COUNT; row++) {
          first[row] = load(q + row * q_stride + x);
          second[row] = load(q + row * q_stride + x + LANES);
        }
#pragma GCC unroll 16
        for (int64_t i = 0; i < KEYS; i++) {
          Floats a, b;
          load_two(rows[i] + x, a, b);
#pragma GCC unroll 4
          for (int64_t row = 0; row < COUNT; row++) {
            c[row * KEYS + i] += first[row] * a;
            c[row * KEYS + i] += second[row] * b;
          }
        }
      }
    }
    if constexpr (sizeof(Query) == 4) {
      for (; x + LANES <= dim; x += LANES)
#pragma GCC unroll 16
        for (int64_t i = 0; i < KEYS; i++) {
          const Floats a = load(rows[i] + x);
#pragma GCC unroll 4
          for (int64_t row = 0; row < COUNT; row++) c[row * KEYS + i] += load(q + row * q_stride + x) * a;
        }
    }
    float sums[LANES];
    store(sums, as_floats(sum_each(c)));
    for (; x < dim; x++)
      for (int64_t i = 0; i < COUNT * KEYS; i++)
        sums[i] = multiply_add(static_cast<float>(q[i / KEYS * q_stride + x]), to_float(rows[i % KEYS] + x), sums[i]);
#pragma GCC unroll 4
    for (int64_t row = 0; row < COUNT; row++)
      memcpy(scores + row * DECODE_STRIDE + key, sums + row * KEYS, sizeof(float) * KEYS);
  }
}

// ---------------------------------------------------------------- products of pairs of keys

// For three or four rows, most of the work on a short key is to add the lanes of its sums. Two keys share a vector here,
// so each row has half as many sums. Inserting the second key takes one instruction per vector, for all rows. It does not
// pay for floats, whose vectors hold half as many elements.
template <class Element>
constexpr bool HAS_KEY_PAIRS = false;
#if LANES == 16 && defined(__AVX512BW__) && defined(__AVX512DQ__)
template <>
constexpr bool HAS_KEY_PAIRS<Bfloat16> = true;
template <>
constexpr bool HAS_KEY_PAIRS<Int8> = true;

// The sums of the halves of eight vectors: of the lower halves of the first four, of their upper halves, then of the
// others.
template <class Vector>
INLINE Vector sum_halves(const Vector *c) {
  __m512 pairs[4], quads[2];
  const auto add = [](__m512 a, __m512 b) __attribute__((always_inline)) { return (__m512)((Vector)a + (Vector)b); };
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512 a = (__m512)c[2 * i], b = (__m512)c[2 * i + 1];
    pairs[i] = add(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const __m512 a = pairs[2 * i], b = pairs[2 * i + 1];
    quads[i] = add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
  }
  return (Vector)add(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88), _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
}

// LANES elements of two keys, as pairs in each lane; and half a vector of a row of q in both halves.
INLINE Ints load_two_keys(const Bfloat16 *a, const Bfloat16 *b) {
  return (Ints)_mm512_inserti32x8(_mm512_castsi256_si512(load_as<__m256i>(a)), load_as<__m256i>(b), 1);
}
INLINE Ints load_two_keys(const Int8 *a, const Int8 *b) {
  const __m256i both = _mm256_inserti128_si256(_mm256_castsi128_si256(load_as<__m128i>(a)), load_as<__m128i>(b), 1);
  return (Ints)_mm512_cvtepi8_epi16(both);
}
template <class Query>
INLINE Ints repeat_half(const Query *from) {
  return (Ints)_mm512_broadcast_f32x8(load_as<__m256>(from));
}
#endif

// As multiply_keys, for three or four rows. The rows of q are in the order of steps of LANES elements.
template <int COUNT, class Products, class Query, class Element>
INLINE void multiply_key_pairs(const Query *q, int64_t q_stride, const Element *k, int64_t k_stride, int64_t dim,
                               int64_t count, Prefetcher &prefetcher, float *scores) {
  constexpr int64_t PAIRS = 4, KEYS = 2 * PAIRS;  // key i and key i + PAIRS share a vector
  const int64_t rows_per_step = ceil_div(KEYS * LANES, max(dim, 1));
  // The last step overlaps the one before, and fewer keys are computed one by one, each as all keys of a step. So the keys
  // of a step are at fixed distances, and need no address each.
  const bool whole = count >= KEYS;
  const int64_t stride = whole ? k_stride : 0;
  for (int64_t done = 0; done < count; done += whole ? KEYS : 1) {
    const int64_t key = whole ? min(done, count - KEYS) : done;
    const Element *low = k + key * k_stride, *high = low + PAIRS * stride;
    Products c[4 * PAIRS];
#pragma GCC unroll 16
    for (int64_t i = 0; i < 4 * PAIRS; i++) c[i] = (Products){};
    int64_t x = 0;
    for (; x + LANES <= dim; x += LANES) {
      prefetcher.fetch(rows_per_step);
      Products first[COUNT], second[COUNT];  // of bfloat16, the even and the odd elements
#pragma GCC unroll 4
      for (int64_t row = 0; row < COUNT; row++) {
        first[row] = (Products)repeat_half(q + row * q_stride + x);
        if constexpr (sizeof(Query) == 4) second[row] = (Products)repeat_half(q + row * q_stride + x + LANES / 2);
      }
#pragma GCC unroll 4
      for (int64_t i = 0; i < PAIRS; i++) {
        const Ints keys = load_two_keys(low + i * stride + x, high + i * stride + x);
#pragma GCC unroll 4
        for (int64_t row = 0; row < COUNT; row++) {
          Products &sums = c[row * PAIRS + i];
          if constexpr (sizeof(Query) == 2) {
            sums = add_int16_pairs(sums, first[row], keys);
          } else {
            sums += first[row] * (Floats)(keys << 16);
            sums += second[row] * (Floats)((Words)keys & 0xffff0000u);
          }
        }
      }
    }
    float sums[4 * KEYS];
    store(sums, as_floats(sum_halves(c)));
    store(sums + 2 * KEYS, as_floats(sum_halves(c + 2 * PAIRS)));
    for (; x < dim; x++)
      for (int64_t i = 0; i < COUNT * KEYS; i++)
        sums[i] = multiply_add(static_cast<float>(q[i / KEYS * q_stride + x]), to_float(low + i % KEYS * stride + x),
                               sums[i]);
#pragma GCC unroll 4
    for (int64_t row = 0; row < COUNT; row++)
      memcpy(scores + row * DECODE_STRIDE + key, sums + row * KEYS, sizeof(float) * KEYS);
  }
}

// ---------------------------------------------------------------- products with values

// sums = factors * sums + weights * values for COUNT rows, over `count` keys and VECTORS vectors of columns. The sums
// are in the order of `load_two`, unless VECTORS is 1.
template <int COUNT, int VECTORS, class Element>
INLINE void add_columns(const float *weights, const float *factors, const Element *v, int64_t stride, int64_t count,
                        int64_t dim, int64_t column, Prefetcher &prefetcher, float *sums, int64_t width) {
  Floats c[COUNT][VECTORS];
#pragma GCC unroll 4
  for (int64_t row = 0; row < COUNT; row++)
#pragma GCC unroll 4
    for (int64_t i = 0; i < VECTORS; i++)
      c[row][i] = load(sums + row * width + column + i * LANES) * broadcast(factors[row]);
  int64_t due = 0;  // a row is prefetched for every row that was read
  for (int64_t key = 0; key < count; key++) {
    due += VECTORS * LANES;
    if (due >= dim) {
      due -= dim;
      prefetcher.fetch(1);
    }
    const Element *from = v + key * stride + column;
    Floats values[VECTORS];
    if constexpr (VECTORS == 1) values[0] = load(from);
    else {
#pragma GCC unroll 4
      for (int64_t i = 0; i < VECTORS; i += 2) load_two(from + i * LANES, values[i], values[i + 1]);
    }
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
    for (int64_t i = 0; i < VECTORS; i++) store(sums + row * width + column + i * LANES, c[row][i]);
}

// sums = factors * sums + weights * values for COUNT rows, from column x on.
template <int COUNT, class Element>
INLINE void add_values(const float *weights, const float *factors, const Element *v, int64_t stride, int64_t count,
                       int64_t dim, int64_t x, Prefetcher &prefetcher, float *sums, int64_t width) {
#if LANES == 16 || NEON
  constexpr int VECTORS = 4;  // as many as fit into 32 registers
#else
  constexpr int VECTORS = 2;
#endif
  for (; x + VECTORS * LANES <= dim; x += VECTORS * LANES)
    add_columns<COUNT, VECTORS>(weights, factors, v, stride, count, dim, x, prefetcher, sums, width);
  for (; x + 2 * LANES <= dim; x += 2 * LANES)
    add_columns<COUNT, 2>(weights, factors, v, stride, count, dim, x, prefetcher, sums, width);
  for (; x + LANES <= dim; x += LANES)
    add_columns<COUNT, 1>(weights, factors, v, stride, count, dim, x, prefetcher, sums, width);
  for (; x < dim; x++)
    for (int64_t row = 0; row < COUNT; row++) {
      float total = sums[row * width + x] * factors[row];
      for (int64_t key = 0; key < count; key++)
        total += weights[row * DECODE_STRIDE + key] * to_float(v + key * stride + x);
      sums[row * width + x] = total;
    }
}

// As add_columns, for values in int8 and weights in int16, (COUNT, DECODE_KEYS), whose factors are `scales`. The sums of a
// block fit into 32 bits.
template <int COUNT, int VECTORS>
INLINE void add_paired_columns(const int16_t *weights, const float *scales, const float *factors, const Int8 *v,
                               int64_t stride, int64_t count, int64_t dim, int64_t column, Prefetcher &prefetcher,
                               float *sums, int64_t width) {
  static_assert(DECODE_KEYS * 127 * int64_t(32767) < int64_t(1) << 31, "the sums of a block fit into 32 bits");
  Ints c[COUNT][VECTORS];
#pragma GCC unroll 4
  for (int64_t row = 0; row < COUNT; row++)
#pragma GCC unroll 4
    for (int64_t i = 0; i < VECTORS; i++) c[row][i] = (Ints){};
  int64_t due = 0;
  for (int64_t key = 0; key < count; key += 2) {
    for (due += 2 * VECTORS * LANES; due >= dim; due -= dim) prefetcher.fetch(1);  // faster than a division
    const Int8 *first = v + key * stride + column;
    const Int8 *second = key + 1 < count ? first + stride : first;  // its weight is 0
    Ints values[VECTORS];
#pragma GCC unroll 4
    for (int64_t i = 0; i < VECTORS; i += 2)
      load_pairs(first + i * LANES, second + i * LANES, values[i], values[i + 1]);
#pragma GCC unroll 4
    for (int64_t row = 0; row < COUNT; row++) {
      int32_t pair;
      memcpy(&pair, weights + row * DECODE_KEYS + key, sizeof pair);
#pragma GCC unroll 4
      for (int64_t i = 0; i < VECTORS; i++) c[row][i] = add_int16_pairs(c[row][i], (Ints){} + pair, values[i]);
    }
  }
#pragma GCC unroll 4
  for (int64_t row = 0; row < COUNT; row++)
#pragma GCC unroll 4
    for (int64_t i = 0; i < VECTORS; i++) {
      float *to = sums + row * width + column + i * LANES;
      store(to, load(to) * broadcast(factors[row]) + as_floats(c[row][i]) * broadcast(scales[row]));
    }
}

// The same for all columns in pairs of vectors. Returns the number of these columns.
template <int COUNT>
INLINE int64_t add_paired_values(const int16_t *weights, const float *scales, const float *factors, const Int8 *v,
                                 int64_t stride, int64_t count, int64_t dim, Prefetcher &prefetcher, float *sums,
                                 int64_t width) {
  int64_t x = 0;
  for (; x + 4 * LANES <= dim; x += 4 * LANES)
    add_paired_columns<COUNT, 4>(weights, scales, factors, v, stride, count, dim, x, prefetcher, sums, width);
  for (; x + 2 * LANES <= dim; x += 2 * LANES)
    add_paired_columns<COUNT, 2>(weights, scales, factors, v, stride, count, dim, x, prefetcher, sums, width);
  return x;
}

// numbers *= factor * factors, element by element.
INLINE void multiply(float *numbers, const float *factors, float factor, int64_t count) {
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    store(numbers + i, load(numbers + i) * (load(factors + i) * broadcast(factor)));
  for (; i < count; i++) numbers[i] *= factors[i] * factor;
}

// Whether for_rows runs this row with at least two others.
INLINE bool in_large_group(int64_t row, int64_t count) { return row < count / 4 * 4 || count % 4 == 3; }

// Call body.template run<COUNT>(row) for at most 4 rows at a time.
template <class Body>
INLINE void for_rows(int64_t count, Body body) {
  int64_t row = 0;
  for (; row + 4 <= count; row += 4) body.template run<4>(row);
  switch (count - row) {
    case 3: return body.template run<3>(row);
    case 2: return body.template run<2>(row);
    case 1: return body.template run<1>(row);
  }
}

}  // namespace
