// Typed, poisoned arrays with a guard behind them, and the tolerances of the comparisons with fp64 twins.
#pragma once

#include <catch2/catch.hpp>
#include <cmath>
#include <cstring>
#include <memory>
#include <vector>

#include "common/random.h"
#include "kernels/cpu/device.h"
#include "kernels/kernels.h"

namespace lrmoe::kernels {

inline double FromBits(Type type, const unsigned char* p) {
  uint32_t bits = 0;
  if (type == Type::kBf16) {
    uint16_t half;
    std::memcpy(&half, p, 2);
    bits = uint32_t{half} << 16;
  } else {
    std::memcpy(&bits, p, 4);
  }
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// n elements of `type`, all NaN at first; 64 guard bytes behind them.
class Elements {
 public:
  Elements(Type type, int64_t n) : type_(type), n_(n), bytes_(n * SizeOf(type) + kGuard, 0xFF) {}

  // Uniform in [-scale, scale], rounded (here: truncated) to the type.
  static Elements Uniform(Type type, int64_t n, Random& random, double scale = 1) {
    Elements out(type, n);
    for (int64_t i = 0; i < n; ++i) out.Set(i, static_cast<float>((random.Uniform() * 2 - 1) * scale));
    return out;
  }

  void Set(int64_t i, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    const uint16_t half = static_cast<uint16_t>(bits >> 16);
    if (type_ == Type::kBf16) {
      std::memcpy(&bytes_[2 * i], &half, 2);
    } else {
      std::memcpy(&bytes_[4 * i], &bits, 4);
    }
  }
  double operator[](int64_t i) const { return FromBits(type_, &bytes_[i * SizeOf(type_)]); }
  int64_t size() const { return n_; }
  Type type() const { return type_; }
  void* ptr() { return bytes_.data(); }
  const void* ptr() const { return bytes_.data(); }
  float* fp32() {
    REQUIRE(type_ == Type::kFp32);
    return static_cast<float*>(ptr());
  }
  void Poison() { std::fill(bytes_.begin(), bytes_.end(), 0xFF); }
  // Nothing was written behind the end.
  bool intact() const {
    for (size_t i = bytes_.size() - kGuard; i < bytes_.size(); ++i) {
      if (bytes_[i] != 0xFF) return false;
    }
    return true;
  }
  bool operator==(const Elements& other) const { return bytes_ == other.bytes_; }

 private:
  static constexpr size_t kGuard = 64;
  Type type_;
  int64_t n_;
  std::vector<unsigned char> bytes_;
};

// Half a unit in the last place, relative, with a little room.
inline double Rounding(Type type) {
  return type == Type::kBf16 ? 0.00391 : 6.0e-8;
}

// Whether `got` is `want` rounded to `type` after fp32 arithmetic on terms whose magnitudes sum to
// `magnitude`.
inline bool Close(Type type, double got, double want, double magnitude, double factor = 1e-6) {
  return std::abs(got - want) <= Rounding(type) * std::abs(want) + factor * magnitude;
}

// Every way this machine can compute: instruction sets and numbers of threads. Name for INFO, and the device.
struct NamedDevice {
  std::string name;
  std::unique_ptr<Device> device;
};
inline std::vector<NamedDevice> AllDevices() {
  std::vector<const cpu::Passes*> sets = {&cpu::kBaselinePasses};
  if (__builtin_cpu_supports("avx2")) sets.push_back(&cpu::kAvx2Passes);
  std::vector<NamedDevice> out;
  for (const cpu::Passes* passes : sets) {
    for (int num_threads : {1, 3}) {
      const std::string name = std::string(passes->name) + ", threads " + std::to_string(num_threads);
      out.push_back({name + ", widen", cpu::MakeCpuDevice(num_threads, *passes, cpu::Bf16Path::kWiden)});
      if (cpu::ChooseBf16Path() == cpu::Bf16Path::kMatmul)
        out.push_back({name + ", matmul", cpu::MakeCpuDevice(num_threads, *passes, cpu::Bf16Path::kMatmul)});
    }
  }
  return out;
}

constexpr Type kTypes[] = {Type::kBf16, Type::kFp32};

}  // namespace lrmoe::kernels
