// The K-th largest of many scores, on the host: exact, O(n), radix select over the bit pattern.
#pragma once

#include <bit>
#include <cstdint>
#include <span>

namespace lrmoe::kernels {

// Bit patterns of non-negative floats order like the floats; the mask makes -0 equal to 0.
inline uint32_t KeyOf(float score) {
  return std::bit_cast<uint32_t>(score) & 0x7FFFFFFFu;
}

// The k-th largest of `keys` (of KeyOf), whose contents are used up; 1 <= k <= n.
uint32_t KthLargestKey(std::span<uint32_t> keys, int64_t k);

}  // namespace lrmoe::kernels
