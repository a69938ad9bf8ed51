// The routing that a caller gives to a forward pass.
#pragma once

#include "absl/status/status.h"
#include "worker/engine/engine.h"

namespace lrmoe::engine {

// InvalidArgument naming token and slot of the first pair whose expert does not exist or is the token's for
// the second time, or whose alpha is not finite. expert_idx and alpha have num_tokens * top_k entries.
absl::Status CheckPairs(const ForwardArgs& args, int32_t num_experts, int32_t top_k);

}  // namespace lrmoe::engine
