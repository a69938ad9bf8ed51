// Proportional quotas, for comparison with lrmoe's.
// Decides like lrmoe, but every expert keeps the same rate of its rows, wherever they run.
// Assumes what lrmoe assumes.
// Differs: no original; ours. Below a rate of 1.0 ranks that are overloaded stay so in backward; an expert
// can fall below its retention floor by the row that rounding takes.
#include "controller/planner/policies/lrmoe.h"
#include "controller/planner/policies/policies.h"

namespace lrmoe::planner {

constinit const PolicyInfo kProportionalPolicy = {
    .name = "proportional",
    .source = "ours: lrmoe's placement with other quotas",
    .decides = "like lrmoe, but every expert keeps the same rate of its rows",
    .assumes = "what lrmoe assumes",
    .differs = "",
    .plan = [](const PlanningProblem& problem, const Workload& work) -> absl::StatusOr<LayerPlan> {
      PolicyHooks hooks = LrmoeHooks(problem, work);
      hooks.quota_rule = QuotaRule::kUniform;
      return RunCandidates(problem, work, hooks);
    },
};

}  // namespace lrmoe::planner
