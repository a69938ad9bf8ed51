// Buffers for kernel tests: seeded values in either type, exact in size so that the address sanitizer sees an
// access beyond them, outputs poisoned with NaN.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <vector>

#include "common/random.h"
#include "kernels/kernels.h"

namespace lrmoe::kernels::cuda {

inline float RoundToBf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0x7FFFu + ((bits >> 16) & 1u)) & 0xFFFF0000u;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Elements of `type`, seen from the test as doubles. `shift` elements of offset break the 16-byte alignment.
class Rows {
 public:
  Rows(Type type, int64_t elements, int64_t shift = 0)
      : type_(type),
        size_(elements),
        shift_(shift),
        bytes_(new unsigned char[(elements + shift) * SizeOf(type)]) {
    std::memset(bytes_.get(), 0xFF, (elements + shift) * SizeOf(type));
  }
  static Rows Random(Type type, int64_t elements, lrmoe::Random& random, int64_t shift = 0) {
    Rows rows(type, elements, shift);
    for (int64_t i = 0; i < elements; ++i) rows.Set(i, static_cast<float>(random.Uniform() * 4 - 2));
    return rows;
  }

  Type type() const { return type_; }
  int64_t size() const { return size_; }
  void* get() { return bytes_.get() + shift_ * SizeOf(type_); }
  void Set(int64_t i, float value) {
    if (type_ == Type::kFp32) {
      std::memcpy(static_cast<float*>(get()) + i, &value, 4);
    } else {
      value = RoundToBf16(value);
      uint32_t bits;
      std::memcpy(&bits, &value, 4);
      static_cast<Bf16*>(get())[i] = static_cast<Bf16>(bits >> 16);
    }
  }
  double operator[](int64_t i) {
    if (type_ == Type::kFp32) return static_cast<float*>(get())[i];
    const uint32_t bits = uint32_t{static_cast<Bf16*>(get())[i]} << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
  }

 private:
  Type type_;
  int64_t size_, shift_;
  std::unique_ptr<unsigned char[]> bytes_;
};

inline std::vector<float> Poisoned(int64_t n) {
  return std::vector<float>(n, std::numeric_limits<float>::quiet_NaN());
}

inline std::vector<float> RandomFloats(int64_t n, lrmoe::Random& random, double low = -1, double high = 1) {
  std::vector<float> values(n);
  for (float& value : values) value = static_cast<float>(low + (high - low) * random.Uniform());
  return values;
}

// Tolerance of one rounding to the type, with room for the fp32 sums before it.
inline double Tolerance(Type type) {
  return type == Type::kBf16 ? 0x1.0p-8 : 2e-6;
}

// |got - want| within `tolerance` of the magnitude that was summed.
inline bool Near(double got, double want, double magnitude, double tolerance) {
  return std::abs(got - want) <= tolerance * (std::abs(magnitude) + 1e-6);
}

}  // namespace lrmoe::kernels::cuda
