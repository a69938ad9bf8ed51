// Identities shared by every program. Positions (expert_idx, rank_idx, ...) are plain int32_t named by their
// suffix; numbers that must never be mixed with them are their own types.
#pragma once

#include <compare>
#include <cstdint>
#include <string>

namespace lrmoe {

// Numbered membership of the worker group. A transport error ends the epoch.
enum class Epoch : uint64_t {};

// Counts optimizer updates of one layer's experts; starts at 1 when weights are loaded, 0 means "no weights".
enum class ParameterVersion : uint64_t {};

// One forward/backward of one MoE layer.
struct Invocation {
  int64_t step = 0;
  int32_t layer = 0;
  int32_t micro_batch = 0;
  auto operator<=>(const Invocation&) const = default;
};

// "step 12 layer 3 micro-batch 0".
std::string ToString(const Invocation& invocation);

}  // namespace lrmoe
