// Tensors of the fuzzer: any strides, memory of exactly the needed size, and a pattern in the gaps that shows writes.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <memory>
#include <random>
#include <vector>

using Random = std::mt19937_64;

inline int64_t uniform(Random &random, int64_t min, int64_t max) {
  return std::uniform_int_distribution<int64_t>(min, max)(random);
}
inline bool chance(Random &random, double share) { return std::uniform_real_distribution<double>(0, 1)(random) < share; }
inline double normal(Random &random) { return std::normal_distribution<double>(0, 1)(random); }

enum class Type { FLOAT, BFLOAT16, FLOAT16, INT64, BYTE, INT8 };

inline int64_t bytes_of(Type type) {
  return type == Type::FLOAT ? 4 : type == Type::INT64 ? 8 : type == Type::BYTE || type == Type::INT8 ? 1 : 2;
}

// Rounded to the nearest bfloat16, ties to even.
inline uint16_t narrow(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return value == value ? static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) : uint16_t{0x7fc0};
}

// The same for float16, by the arithmetic of its definition: 11 significant bits, and exponents from -14 to 15.
inline uint16_t narrow_to_float16(double value) {
  const uint16_t sign = signbit(value) ? 0x8000 : 0;
  const double size = fabs(value);
  if (size != size) return 0x7e00;
  if (size >= 65520) return sign | 0x7c00;
  int exponent = -13;
  if (size >= 0x1p-14) frexp(size, &exponent);  // size is below 2^exponent
  const double units = nearbyint(ldexp(size, 11 - exponent));  // 1024 units and more for a normal number
  return static_cast<uint16_t>(sign + (exponent + 13) * 1024 + static_cast<int>(units));
}
inline double widen_float16(uint16_t bits) {
  const int exponent = bits >> 10 & 31, fraction = bits & 1023;
  const double size = exponent == 31 ? (fraction ? NAN : INFINITY)
                                     : ldexp(exponent ? 1024 + fraction : fraction, (exponent ? exponent : 1) - 25);
  return bits & 0x8000 ? -size : size;
}

// A tensor with four axes. Gaps and elements that were never written contain 0xFF bytes: NaN, -1 or 255.
class Tensor {
 public:
  Type type = Type::FLOAT;
  int64_t sizes[4] = {0, 0, 0, 0}, strides[4] = {0, 0, 0, 0};

  Tensor() = default;

  // Contiguous.
  Tensor(Type type, int64_t a, int64_t b, int64_t c, int64_t d)
      : type(type), sizes{a, b, c, d}, strides{b * c * d, c * d, d, 1} {
    allocate(0);
  }

  // The last axis is contiguous, rows and heads are in either order, and gaps are random.
  Tensor(Random &random, Type type, int64_t a, int64_t b, int64_t c, int64_t d, bool may_repeat)
      : type(type), sizes{a, b, c, d} {
    const auto gap = [&] { return chance(random, 0.5) ? uniform(random, 0, 9) : 0; };
    strides[3] = 1;
    const int inner = chance(random, 0.5) ? 2 : 1, outer = 3 - inner;
    strides[inner] = d + gap();
    strides[outer] = sizes[inner] * strides[inner] + gap();
    strides[0] = sizes[outer] * strides[outer] + gap();
    if (may_repeat && chance(random, 0.1)) strides[uniform(random, 0, 1)] = 0;
    allocate(uniform(random, 0, 3));
  }

  // Some axes broadcast with stride 0; the others are in order, with random gaps.
  static Tensor broadcasting(Random &random, Type type, int64_t a, int64_t b, int64_t c, int64_t d, bool may_repeat) {
    Tensor result;
    result.type = type;
    const int64_t sizes[4] = {a, b, c, d};
    int64_t stride = 1;
    for (int axis = 3; axis >= 0; axis--) {
      result.sizes[axis] = sizes[axis];
      if (chance(random, 0.15)) stride += uniform(random, 0, 4);
      const bool repeats = may_repeat && chance(random, axis == 3 ? 0.1 : 0.3);
      result.strides[axis] = repeats ? 0 : stride;
      if (!repeats) stride *= sizes[axis] > 0 ? sizes[axis] : 1;
    }
    result.allocate(uniform(random, 0, 3));
    return result;
  }

  explicit operator bool() const { return memory_ != nullptr; }
  template <class Item = void>
  Item *data() const {
    void *first = memory_ ? memory_.get() + first_ * bytes_of(type) : nullptr;
    return static_cast<Item *>(first);
  }
  bool empty() const { return !(sizes[0] && sizes[1] && sizes[2] && sizes[3]); }

  double at(int64_t a, int64_t b, int64_t c, int64_t d = 0) const {
    const unsigned char *place = element(a, b, c, d);
    switch (type) {
      case Type::FLOAT: return read<float>(place);
      case Type::BFLOAT16: {
        const uint32_t bits = static_cast<uint32_t>(read<uint16_t>(place)) << 16;
        float value;
        memcpy(&value, &bits, 4);
        return value;
      }
      case Type::FLOAT16: return widen_float16(read<uint16_t>(place));
      case Type::INT64: return static_cast<double>(read<int64_t>(place));
      case Type::BYTE: return *place;
      case Type::INT8: return read<int8_t>(place);
    }
    return 0;
  }

  void set(double value, int64_t a, int64_t b, int64_t c, int64_t d = 0) {
    unsigned char *place = element(a, b, c, d);
    switch (type) {
      case Type::FLOAT: return write(place, static_cast<float>(value));
      case Type::BFLOAT16: return write(place, narrow(static_cast<float>(value)));
      case Type::FLOAT16: return write(place, narrow_to_float16(value));
      case Type::INT64: return write(place, static_cast<int64_t>(value));
      case Type::BYTE: return write(place, static_cast<unsigned char>(value));
      case Type::INT8: return write(place, static_cast<int8_t>(value));
    }
  }

  // Call visit(a, b, c, d) for the indices of each element.
  template <class Visit>
  void each(Visit visit) const {
    for (int64_t a = 0; a < sizes[0]; a++)
      for (int64_t b = 0; b < sizes[1]; b++)
        for (int64_t c = 0; c < sizes[2]; c++)
          for (int64_t d = 0; d < sizes[3]; d++) visit(a, b, c, d);
  }

  // Whether the gaps between elements still contain the pattern.
  bool gaps_untouched() const {
    std::vector<bool> used(static_cast<size_t>(bytes_));
    each([&](int64_t a, int64_t b, int64_t c, int64_t d) {
      const int64_t begin = element(a, b, c, d) - memory_.get();
      for (int64_t i = 0; i < bytes_of(type); i++) used[static_cast<size_t>(begin + i)] = true;
    });
    for (int64_t i = 0; i < bytes_; i++)
      if (!used[static_cast<size_t>(i)] && memory_[static_cast<size_t>(i)] != 0xff) return false;
    return true;
  }

  // Whether every byte equals that of a tensor with the same strides.
  bool same_bits(const Tensor &other) const {
    return bytes_ == other.bytes_ && !memcmp(memory_.get(), other.memory_.get(), static_cast<size_t>(bytes_));
  }

  Tensor copy() const {
    Tensor result;
    result.type = type;
    memcpy(result.sizes, sizes, sizeof sizes);
    memcpy(result.strides, strides, sizeof strides);
    result.first_ = first_;
    result.bytes_ = bytes_;
    if (memory_) {
      result.memory_ = memory_of(bytes_);
      memcpy(result.memory_.get(), memory_.get(), static_cast<size_t>(bytes_));
    }
    return result;
  }

 private:
  struct Free {
    void operator()(unsigned char *memory) const { free(memory); }
  };
  using Memory = std::unique_ptr<unsigned char[], Free>;

  // Aligned as the memory of torch is, and of exactly this size, so that sanitizers find an access beyond it.
  static Memory memory_of(int64_t bytes) {
    void *memory = nullptr;
    if (posix_memalign(&memory, 64, static_cast<size_t>(bytes > 0 ? bytes : 1))) abort();
    return Memory(static_cast<unsigned char *>(memory));
  }

  void allocate(int64_t before) {
    int64_t last = empty() ? -1 : 0;
    for (int axis = 0; axis < 4 && last >= 0; axis++) last += (sizes[axis] - 1) * strides[axis];
    first_ = before;
    bytes_ = (before + last + 1) * bytes_of(type);
    memory_ = memory_of(bytes_);
    memset(memory_.get(), 0xff, static_cast<size_t>(bytes_));
  }

  unsigned char *element(int64_t a, int64_t b, int64_t c, int64_t d) const {
    return memory_.get() + (first_ + a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3]) * bytes_of(type);
  }
  template <class Value>
  static Value read(const unsigned char *place) {
    Value value;
    memcpy(&value, place, sizeof value);
    return value;
  }
  template <class Value>
  static void write(unsigned char *place, Value value) {
    memcpy(place, &value, sizeof value);
  }

  int64_t first_ = 0, bytes_ = 0;
  Memory memory_;
};
