// A number in [0, 1) for each pair, from a seed and the pair alone: the same on every device.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)
#define LRMOE_ON_EITHER_SIDE __host__ __device__
#else
#define LRMOE_ON_EITHER_SIDE
#endif

namespace lrmoe::kernels {

// One step of SplitMix64, of which 24 bits are taken: every value is a float.
LRMOE_ON_EITHER_SIDE inline float DrawOf(uint64_t seed, uint64_t pair) {
  constexpr uint64_t kStep = 0x9E3779B97F4A7C15ULL;
  uint64_t z = (seed ^ (pair * kStep)) + kStep;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ULL;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBULL;
  z ^= z >> 31;
  return static_cast<float>(z >> 40) * 0x1.0p-24F;
}

}  // namespace lrmoe::kernels
