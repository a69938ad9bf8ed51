// Arrays for tests of operations on plain numbers: poisoned, with a guard on both sides. A test runs the
// operation on one and its twin on a copy; they are then equal, also where nothing was to be written.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <utility>
#include <vector>

#include "common/random.h"

namespace lrmoe::kernels {

template <typename T>
class Poisoned {
 public:
  explicit Poisoned(int64_t n) : n_(n), all_(n + 2 * kGuard) {
    std::memset(static_cast<void*>(all_.data()), 0xA5, bytes());
  }
  explicit Poisoned(const std::vector<T>& values) : Poisoned(static_cast<int64_t>(values.size())) {
    std::copy(values.begin(), values.end(), ptr());
  }

  T* ptr() { return all_.data() + kGuard; }
  T& operator[](int64_t i) { return all_[kGuard + i]; }
  int64_t size() const { return n_; }
  // Takes over [begin, end), which the operation may fill as it likes.
  void CopyUnspecified(const Poisoned& other, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) all_[kGuard + i] = other.all_[kGuard + i];
  }
  // Bit for bit.
  bool operator==(const Poisoned& other) const {
    return n_ == other.n_ && std::memcmp(all_.data(), other.all_.data(), bytes()) == 0;
  }

 private:
  static constexpr int64_t kGuard = 16;
  size_t bytes() const { return all_.size() * sizeof(T); }
  int64_t n_;
  std::vector<T> all_;
};

template <typename T>
void Shuffle(Random& random, std::vector<T>& values) {
  for (size_t i = values.size(); i > 1; --i) std::swap(values[i - 1], values[random.Below(i)]);
}

// 0 .. n - 1 in any order.
inline std::vector<int32_t> Permutation(Random& random, int64_t n) {
  std::vector<int32_t> out(n);
  std::iota(out.begin(), out.end(), 0);
  Shuffle(random, out);
  return out;
}

}  // namespace lrmoe::kernels
