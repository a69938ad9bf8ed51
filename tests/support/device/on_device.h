// Buffers in a device's memory, for checks that run where there is no test framework.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "common/check.h"
#include "kernels/kernels.h"

namespace lrmoe::testing {

// Empty vectors have no address.
inline void CopyBytes(void* to, const void* from, size_t bytes) {
  if (bytes > 0) std::memcpy(to, from, bytes);
}

template <typename T>
std::vector<std::byte> Bytes(const std::vector<T>& values) {
  std::vector<std::byte> bytes(values.size() * sizeof(T));
  CopyBytes(bytes.data(), values.data(), bytes.size());
  return bytes;
}
// NaN, or -1.
inline std::vector<std::byte> Poison(int64_t bytes) {
  return std::vector<std::byte>(bytes, std::byte{0xFF});
}

class OnDevice {
 public:
  OnDevice(kernels::Device& device, const std::vector<std::byte>& bytes)
      : device_(device), bytes_(static_cast<int64_t>(bytes.size())) {
    memory_ = std::move(device.Reserve(std::max<int64_t>(1, bytes_))).value();
    LRMOE_CHECK(memory_->Commit(std::max<int64_t>(1, bytes_)).ok());
    device.Upload(memory_->base(), bytes.data(), bytes_);
    LRMOE_CHECK(device.Wait().ok());
  }
  template <typename T>
  OnDevice(kernels::Device& device, const std::vector<T>& values) : OnDevice(device, Bytes(values)) {}

  void* get() const { return memory_->base(); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(memory_->base());
  }
  template <typename T>
  std::span<T> span() const {
    return {as<T>(), bytes_ / sizeof(T)};
  }
  std::vector<std::byte> Read() const { return Read<std::byte>(); }
  template <typename T>
  std::vector<T> Read() const {
    std::vector<T> values(bytes_ / sizeof(T));
    device_.Download(values.data(), memory_->base(), bytes_);
    LRMOE_CHECK(device_.Wait().ok());
    return values;
  }

 private:
  kernels::Device& device_;
  int64_t bytes_;
  std::unique_ptr<kernels::Memory> memory_;
};

}  // namespace lrmoe::testing
