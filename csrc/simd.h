// Vectors of LANES floats: arithmetic by the vector extensions of GCC and Clang, intrinsics for other instructions.
//
// float16 is converted to float when it is loaded and packed, so it has the code and the accuracy of float32 sums.
// `vcvtph2ps` is part of AVX-512, and of F16C, which every processor with AVX2 has; NEON has `fcvtl`, and the other
// sets compute the same with integers.
#pragma once
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif NEON
#include <arm_neon.h>
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE __attribute__((noinline))  // one copy of a function that several places call

namespace {

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef int16_t Shorts __attribute__((vector_size(LANES * 2)));
typedef uint8_t Bytes __attribute__((vector_size(LANES)));

struct Bfloat16 {
  uint16_t bits;
  static constexpr uint16_t INFINITY_BITS = 0x7f80;
};
struct Float16 {
  uint16_t bits;
  static constexpr uint16_t INFINITY_BITS = 0x7c00;
};
struct Int8 {  // of a tensor with a scale per row
  int8_t value;
};

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float INF = __builtin_inff(), NOT_A_NUMBER = __builtin_nanf("");

INLINE int64_t min(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t max(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t ceil_div(int64_t count, int64_t divisor) { return (count + divisor - 1) / divisor; }
INLINE int64_t round_up(int64_t count, int64_t multiple) { return ceil_div(count, multiple) * multiple; }

// ---------------------------------------------------------------- memory

template <class Vector, class Element>
INLINE Vector load_as(const Element *from) {
  Vector value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

INLINE Floats broadcast(float x) { return x - (Floats){}; }
INLINE Floats load(const float *from) { return load_as<Floats>(from); }

INLINE Words widen(Halves halves) {
#if NEON  // GCC converts lane by lane here and in the functions below
  return (Words)vmovl_u16((uint16x4_t)halves);
#else
  return __builtin_convertvector(halves, Words);
#endif
}
INLINE Floats load(const Bfloat16 *from) { return (Floats)(widen(load_as<Halves>(from)) << 16); }

// The same numbers as floats; an infinity and NaN stay what they are.
INLINE Floats from_float16(Halves halves) {
#if LANES == 16 && defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps((__m256i)halves);
#elif LANES == 8 && defined(__F16C__)
  return (Floats)_mm256_cvtph_ps((__m128i)halves);
#elif NEON
  return (Floats)vcvt_f32_f16((float16x4_t)halves);
#else
  const Words bits = __builtin_convertvector(halves, Words), size = bits & 0x7fff;
  const Words normal = (size << 13) + (127 - 15) * (1u << 23);
  const Floats subnormal = __builtin_convertvector((Ints)size, Floats) * broadcast(0x1p-24f);
  const Words magnitude = size < 0x0400 ? (Words)subnormal : size < 0x7c00 ? normal : (size << 13 | 0x7f800000u);
  return (Floats)(magnitude | (bits & 0x8000) << 16);
#endif
}
INLINE Floats load(const Float16 *from) { return from_float16(load_as<Halves>(from)); }
INLINE Floats load(const Int8 *from) {
#if LANES == 16 && defined(__AVX512F__)
  return (Floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load_as<__m128i>(from)));
#elif LANES == 8 && defined(__AVX2__)
  return (Floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(from))));
#elif NEON
  const int16x8_t wide = vmovl_s8(vreinterpret_s8_u32(vdup_n_u32(load_as<uint32_t>(from))));
  return (Floats)vcvtq_f32_s32(vmovl_s16(vget_low_s16(wide)));
#else
  typedef int8_t SignedBytes __attribute__((vector_size(LANES)));
  return __builtin_convertvector(load_as<SignedBytes>(from), Floats);
#endif
}
INLINE Ints load_bytes(const uint8_t *from) {
#if NEON
  const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(load_as<uint32_t>(from))));
  return (Ints)vmovl_u16(vget_low_u16(wide));
#else
  return __builtin_convertvector(load_as<Bytes>(from), Ints);
#endif
}
INLINE void store(float *to, Floats value) { __builtin_memcpy(to, &value, sizeof value); }
INLINE Floats gather(const float *from, Ints index) {
#if LANES == 16 && defined(__AVX512F__)
  return (Floats)_mm512_i32gather_ps((__m512i)index, from, sizeof(float));
#elif LANES == 8 && defined(__AVX2__)
  return (Floats)_mm256_i32gather_ps(from, (__m256i)index, sizeof(float));
#else
  Floats values;
  for (int lane = 0; lane < LANES; lane++) values[lane] = from[index[lane]];
  return values;
#endif
}

INLINE float to_float(const float *from) { return *from; }
INLINE float to_float(const Int8 *from) { return from->value; }
INLINE float to_float(const Bfloat16 *from) {
  const uint32_t bits = (uint32_t)from->bits << 16;
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

INLINE float to_float(const Float16 *from) { return from_float16((Halves){} + from->bits)[0]; }

// Rounded to the nearest float16, ties to even; from 65520 on it is an infinity, and NaN stays NaN.
INLINE Halves to_float16(Floats value) {
#if LANES == 16 && defined(__AVX512F__)
  return (Halves)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif LANES == 8 && defined(__F16C__)
  return (Halves)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#elif NEON
  return (Halves)vcvt_f16_f32((float32x4_t)value);
#else
  const Words size = (Words)value & 0x7fffffff;
  const Words normal = (size - 0x38000000 + 0xfff + ((size >> 13) & 1)) >> 13;
  const Words subnormal = (Words)((Floats)size + broadcast(0.5f)) - 0x3f000000;  // 0.5 is 2^24 of its last bits
  const Words finite = size < 0x38800000 ? subnormal : size < 0x477ff000 ? normal : (Words){} + 0x7c00;
  const Words rounded = size > 0x7f800000 ? (Words){} + 0x7e00 : finite;
  return __builtin_convertvector(rounded | ((Words)value >> 16 & 0x8000), Halves);
#endif
}
INLINE void store(Float16 *to, Floats value) {
  const Halves halves = to_float16(value);
  __builtin_memcpy(to, &halves, sizeof halves);
}
INLINE void store_element(Float16 *to, float value) { to->bits = to_float16(broadcast(value))[0]; }

// Rounded to the nearest bfloat16, ties to even; NaN stays NaN.
INLINE Halves to_bfloat16(Floats value) {
#if NEON && BF16_DOT
  return (Halves)vcvt_bf16_f32((float32x4_t)value);
#else
  const Words bits = (Words)value;
  const Words rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  const Words words = value == value ? rounded : (Words){} + 0x7fc0;
#if NEON
  return (Halves)vmovn_u32((uint32x4_t)words);
#else
  return __builtin_convertvector(words, Halves);
#endif
#endif
}
INLINE void store(Bfloat16 *to, Floats value) {
  const Halves halves = to_bfloat16(value);
  __builtin_memcpy(to, &halves, sizeof halves);
}
INLINE void store_element(float *to, float value) { *to = value; }
INLINE void store_element(Bfloat16 *to, float value) { to->bits = to_bfloat16(broadcast(value))[0]; }

// ---------------------------------------------------------------- comparison

INLINE Floats select(Ints where, Floats a, Floats b) { return where ? a : b; }
INLINE Ints index_from(int64_t first) {  // first, first + 1, ...
  Ints index;
  for (int lane = 0; lane < LANES; lane++) index[lane] = lane;
  return index + (int32_t)first;
}
INLINE Floats absolute(Floats x) { return (Floats)((Ints)x & 0x7fffffff); }
INLINE bool finite(float x) { return x - x == 0; }

// a b + c, always rounded once; the compiler may decide otherwise in each place.
INLINE Floats multiply_add(Floats a, Floats b, Floats c) {
#if LANES == 16 && defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8 && defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif NEON
  return (Floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  for (int lane = 0; lane < LANES; lane++) c[lane] = __builtin_fmaf(a[lane], b[lane], c[lane]);
  return c;
#endif
}

// The larger of a and b. It is NaN where b is NaN; where only a is, it is b, or NaN on NEON.
INLINE Floats maximum(Floats a, Floats b) {
#if LANES == 16 && defined(__AVX512F__)
  return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#elif LANES == 8 && defined(__AVX__)
  return (Floats)_mm256_max_ps((__m256)a, (__m256)b);
#elif LANES == 4 && defined(__SSE__)
  return (Floats)_mm_max_ps((__m128)a, (__m128)b);
#elif NEON
  return (Floats)vmaxq_f32((float32x4_t)a, (float32x4_t)b);
#else
  return a > b ? a : b;
#endif
}

INLINE bool any(Ints where) {
#if LANES == 16 && defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)where, (__m512i)where) != 0;
#elif LANES == 8 && defined(__AVX__)
  return !_mm256_testz_si256((__m256i)where, (__m256i)where);
#elif NEON
  return vmaxvq_u32((uint32x4_t)where) != 0;
#else
  int32_t result = 0;
  for (int lane = 0; lane < LANES; lane++) result |= where[lane];
  return result != 0;
#endif
}

// ---------------------------------------------------------------- reductions over the lanes

#if defined(__SSE3__) || LANES == 4
typedef float Quad __attribute__((vector_size(16)));
#endif

// The sum of the lanes: of the halves of the vector, then of their halves, and so on to 4; then (0 + 1) + (2 + 3).
INLINE float sum(Floats x) {
#if LANES == 16 && defined(__AVX512F__)
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
  Quad quad = (Quad)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  return (quad[0] + quad[1]) + (quad[2] + quad[3]);
#elif LANES == 8 && defined(__AVX__)
  Quad quad = (Quad)_mm_add_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  return (quad[0] + quad[1]) + (quad[2] + quad[3]);
#elif NEON
  return vaddvq_f32((float32x4_t)x);  // of pairs, in this order
#else
  for (int width = LANES / 2; width >= 4; width /= 2)
    for (int lane = 0; lane < width; lane++) x[lane] += x[lane + width];
  return (x[0] + x[1]) + (x[2] + x[3]);
#endif
}

INLINE float reduce_max(Floats x) {
#if LANES == 16 && defined(__AVX512F__)
  const __m256 half = _mm256_max_ps(_mm512_castps512_ps256((__m512)x), _mm512_extractf32x8_ps((__m512)x, 1));
  const __m128 quad = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  const __m128 pair = _mm_max_ps(quad, _mm_movehl_ps(quad, quad));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
#elif LANES == 8 && defined(__AVX__)
  const __m128 quad = _mm_max_ps(_mm256_castps256_ps128((__m256)x), _mm256_extractf128_ps((__m256)x, 1));
  const __m128 pair = _mm_max_ps(quad, _mm_movehl_ps(quad, quad));
  return _mm_cvtss_f32(_mm_max_ss(pair, _mm_shuffle_ps(pair, pair, 1)));
#elif NEON
  return vmaxvq_f32((float32x4_t)x);
#else
  float result = x[0];
  for (int lane = 1; lane < LANES; lane++) result = x[lane] > result ? x[lane] : result;
  return result;
#endif
}

// ---------------------------------------------------------------- functions

INLINE Floats square_root(Floats x) {
#if LANES == 16 && defined(__AVX512F__)
  return (Floats)_mm512_sqrt_ps((__m512)x);
#elif LANES == 8 && defined(__AVX__)
  return (Floats)_mm256_sqrt_ps((__m256)x);
#elif NEON
  return (Floats)vsqrtq_f32((float32x4_t)x);
#else
  for (int lane = 0; lane < LANES; lane++) x[lane] = __builtin_sqrtf(x[lane]);
  return x;
#endif
}

// 2^x for x from -127, where it is exactly 0, to below 128; NaN stays NaN. The polynomial is a minimax fit with an error
// of 1.1e-7.
INLINE Floats exp2_clamped(Floats x) {
  const Floats shifted = x + broadcast(12582912.f);  // 1.5 * 2^23: the last bits of the sum are x, rounded to an integer
  const Floats rest = x - (shifted - broadcast(12582912.f));
  Floats power = broadcast(0.001326472731307149f);
  power = power * rest + broadcast(0.009671512991189957f);
  power = power * rest + broadcast(0.05550733581185341f);
  power = power * rest + broadcast(0.24022242426872253f);
  power = power * rest + broadcast(0.6931470036506653f);
  power = power * rest + broadcast(1.f);
  return (Floats)((Ints)power + ((Ints)shifted << 23));
}
// The same for every x below 128: exactly 0 for x <= -127.
INLINE Floats exp2(Floats x) { return exp2_clamped(maximum(broadcast(-127.f), x)); }

// log2(x) for x that is positive, finite and not subnormal; NaN stays NaN. With m = x / 2^n from sqrt(1/2) to sqrt(2) and
// s = (m - 1) / (m + 1), log(m) = 2 (s + s^3 / 3 + s^5 / 5 + ...); the first omitted term is below 1e-9.
INLINE Floats log2(Floats x) {
  const Ints shifted = (Ints)x - 0x3f3504f3;  // bits of sqrt(1/2)
  const Ints exponent = shifted >> 23;
  const Floats m = (Floats)((shifted & 0x7fffff) + 0x3f3504f3);
  const Floats s = (m - broadcast(1.f)) / (m + broadcast(1.f)), square = s * s;
  Floats series = broadcast(2 * LOG2_E / 9);
  series = series * square + broadcast(2 * LOG2_E / 7);
  series = series * square + broadcast(2 * LOG2_E / 5);
  series = series * square + broadcast(2 * LOG2_E / 3);
  series = series * square + broadcast(2 * LOG2_E);
  const Floats result = series * s + __builtin_convertvector(exponent, Floats);
  return select(x == x, result, x);
}

// tanh(x): near 0 a polynomial fit; elsewhere 1 - 2 / (e^2x + 1). NaN stays NaN.
INLINE Floats tanh(Floats x) {
  const Floats square = x * x;
  Floats series = broadcast(-0.005679258611053228f);
  series = series * square + broadcast(0.020618082955479622f);
  series = series * square + broadcast(-0.05373398959636688f);
  series = series * square + broadcast(0.1333138346672058f);
  series = series * square + broadcast(-0.3333328068256378f);
  const Floats near = x + x * square * series;
  const Floats size = absolute(x);
  const Floats capped = size > broadcast(10.f) ? broadcast(10.f) : size;  // tanh(10) is 1 in float
  const Floats far = broadcast(1.f) - broadcast(2.f) / (exp2(capped * broadcast(2 * LOG2_E)) + broadcast(1.f));
  const Floats signed_far = (Floats)((Ints)far | ((Ints)x & (int32_t)0x80000000));
  return size < broadcast(0.625f) ? near : signed_far;
}

// A bijection of 32 bits whose output looks random: xor-shift and multiply, as in the finaliser of MurmurHash3.
INLINE uint32_t mix_bits(uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}
INLINE Words mix_bits(Words x) {
  x = (x ^ (x >> 16)) * 0x85ebca6bu;
  x = (x ^ (x >> 13)) * 0xc2b2ae35u;
  return x ^ (x >> 16);
}

}  // namespace
