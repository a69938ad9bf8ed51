#include <algorithm>
#include <bit>
#include <cstdint>
#include <limits>

#include "kernels/kernels.h"
#include "kernels/precondition.h"

namespace lrmoe::kernels {
namespace {

// Bit patterns of non-negative floats order like the floats; the mask makes -0 equal to 0.
uint32_t KeyOf(float score) {
  return std::bit_cast<uint32_t>(score) & 0x7FFFFFFFu;
}

// Three digits of a key, most significant first: 11, 10 and 10 bits.
constexpr int kShift[3] = {20, 10, 0};
constexpr uint32_t kDigits[3] = {2048, 1024, 1024};

// Below this many keys a partial sort is faster than the histograms that are left.
constexpr size_t kSmall = 512;

// Key of the k-th largest, 1 <= k <= n. `keys` [n] is overwritten.
uint32_t KthLargestKey(std::span<const float> scores, int64_t k, std::span<uint32_t> keys) {
  std::transform(scores.begin(), scores.end(), keys.begin(), KeyOf);
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
    const auto others =
        std::ranges::remove_if(keys, [=](uint32_t key) { return ((key >> shift) & mask) != digit; });
    keys = keys.first(keys.size() - others.size());
  }
  return prefix;
}

}  // namespace

TopK SelectTopK(std::span<const float> scores, int64_t k, std::span<uint32_t> scratch) {
  LRMOE_KERNELS_REQUIRE(k >= 0 && k <= static_cast<int64_t>(scores.size()));
  LRMOE_KERNELS_REQUIRE(scratch.size() >= scores.size());
  if (k == 0) return {std::numeric_limits<float>::infinity(), 0};
  const uint32_t key = KthLargestKey(scores, k, scratch.first(scores.size()));
  int64_t above = 0;
  for (float score : scores) above += KeyOf(score) > key;
  return {std::bit_cast<float>(key), k - above};
}

}  // namespace lrmoe::kernels
