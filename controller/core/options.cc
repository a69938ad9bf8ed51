#include "controller/core/options.h"

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"

namespace lrmoe::core {

absl::Status Validate(const CoreOptions& options) {
  const struct {
    absl::string_view name;
    int64_t value, low, high;
  } ranges[] = {
      {"max_ranks", options.max_ranks, 1, 1024},
      {"ranks", options.ranks, 0, options.max_ranks},
      {"max_layers", options.max_layers, 1, 1024},
      {"max_experts", options.max_experts, 1, 4096},
      {"max_sessions", options.max_sessions, 1, 65536},
      {"max_queued_invocations", options.max_queued_invocations, 1, 65536},
      {"max_plans_kept", options.max_plans_kept, 1, 1 << 20},
      {"max_plan_bytes_kept", options.max_plan_bytes_kept, 1 << 20, int64_t{1} << 40},
      {"max_policy_changes", options.max_policy_changes, 2, 1024},
      {"hello_timeout_us", options.hello_timeout_us, 1000, 3'600'000'000},
      {"reconnect_grace_us", options.reconnect_grace_us, 0, 3'600'000'000},
      {"missing_after_us", options.missing_after_us, 1000, 3'600'000'000},
  };
  for (const auto& range : ranges)
    if (range.value < range.low || range.value > range.high)
      return absl::InvalidArgumentError(
          absl::StrCat(range.name, " is ", range.value, "; allowed: ", range.low, "..", range.high));
  return Validate(options.policy);
}

}  // namespace lrmoe::core
