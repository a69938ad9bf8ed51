// Every operation of a device against the CPU device, on random and ragged shapes: written once, for emulated
// devices and for real ones. No test framework: it also runs where there is none.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "kernels/kernels.h"

namespace lrmoe::testing {

struct CheckResult {
  std::string name;
  int64_t cases = 0;
  double worst = 0;     // difference, relative to the magnitude that was summed
  std::string failure;  // the first; empty: passed
};

// How large the shapes are: small ones for emulators and memory checkers.
enum class CheckSize : uint8_t { kSmall, kLarge };

// Buffers of results are poisoned before each case. Results are compared twice over: a second run must give
// the same bits.
std::vector<CheckResult> CheckDevice(kernels::Device& device, CheckSize size, uint64_t seed);

// The same of its pair operations (kernels/pairs.h), bit for bit but for sums of scores.
std::vector<CheckResult> CheckPairs(kernels::Device& device, CheckSize size, uint64_t seed);

}  // namespace lrmoe::testing
