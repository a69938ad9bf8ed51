#include "controller/planner/policies/policies.h"

namespace lrmoe::planner {

std::span<const PolicyInfo> AllPolicies() {
  static const PolicyInfo kPolicies[] = {
      {"lrmoe", "LRMoE (arXiv 2610.37720), Algorithm 1",
       "from exact counts: retention rate, max-min fair quotas, replicas within the balance tolerance with "
       "the fewest "
       "transfers, exact least-peak rows forward and backward",
       "owners are fixed; replicas are filled before forward and their gradients summed at the owner", "",
       true, PlanLrmoe},
      {"fixed", "Megatron-LM expert parallelism", "nothing: every row runs at its expert's owner",
       "memory for the most loaded rank",
       "with candidate rates below 1.0, Algorithm 1 lowers retention where memory does not suffice", true,
       PlanFixed},
      kUltraepPolicy,
      kMoonepPolicy,
      kEchoPolicy,
      kLlepPolicy,
      kEplbPolicy,
      kSymiPolicy,
      kLaerPolicy,
      kFastermoePolicy,
      kSmartmoePolicy,
      kFlexmoePolicy,
      kTopoepPolicy,
      kProportionalPolicy,
      kWaterfillPolicy,
      kIdealPolicy,
  };
  return kPolicies;
}

const PolicyInfo* FindPolicy(absl::string_view name) {
  for (const PolicyInfo& info : AllPolicies())
    if (info.name == name) return &info;
  return nullptr;
}

}  // namespace lrmoe::planner
