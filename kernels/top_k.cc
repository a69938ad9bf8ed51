#include "kernels/top_k.h"

#include <algorithm>
#include <functional>

#include "kernels/precondition.h"

namespace lrmoe::kernels {
namespace {

// Three digits of a key, most significant first: 11, 10 and 10 bits.
constexpr int kShift[3] = {20, 10, 0};
constexpr uint32_t kDigits[3] = {2048, 1024, 1024};

// Below this many keys a partial sort is faster than the histograms that are left.
constexpr size_t kSmall = 512;

}  // namespace

uint32_t KthLargestKey(std::span<uint32_t> keys, int64_t k) {
  LRMOE_KERNELS_REQUIRE(k >= 1 && k <= static_cast<int64_t>(keys.size()));
  uint32_t prefix = 0;
  for (int pass = 0; pass < 3; ++pass) {
    if (keys.size() < kSmall) {
      std::nth_element(keys.begin(), keys.begin() + (k - 1), keys.end(), std::greater<>());
      return keys[k - 1];
    }
    const uint32_t mask = kDigits[pass] - 1;
    const int shift = kShift[pass];
    // Two histograms: neighbouring scores often share a digit, and one counter would wait for itself.
    int64_t count[2][2048] = {};
    for (size_t i = 0; i < keys.size(); ++i) ++count[i & 1][(keys[i] >> shift) & mask];
    uint32_t digit = mask;
    for (; count[0][digit] + count[1][digit] < k; --digit) k -= count[0][digit] + count[1][digit];
    prefix |= digit << shift;
    const auto rest = std::remove_if(keys.begin(), keys.end(),
                                     [=](uint32_t key) { return ((key >> shift) & mask) != digit; });
    keys = keys.first(rest - keys.begin());
  }
  return prefix;
}

}  // namespace lrmoe::kernels
