// Water-filled quotas, for comparison with lrmoe's.
// Decides like lrmoe, but every expert keeps the same number of rows as far as it has them: cold experts keep
// all, hot ones are cut to one level.
// Assumes what lrmoe assumes.
// Differs: no original; ours.
#include "controller/planner/policies/lrmoe.h"
#include "controller/planner/policies/policies.h"

namespace lrmoe::planner {

constinit const PolicyInfo kWaterfillPolicy = {
    .name = "waterfill",
    .source = "ours: lrmoe's placement with other quotas",
    .decides = "like lrmoe, but every expert keeps the same number of rows, as far as it has them",
    .assumes = "what lrmoe assumes",
    .differs = "",
    .plan = [](const PlanningProblem& problem, const Workload& work) -> absl::StatusOr<LayerPlan> {
      PolicyHooks hooks = LrmoeHooks(problem, work);
      hooks.quota_rule = QuotaRule::kWaterfill;
      return RunCandidates(problem, work, hooks);
    },
};

}  // namespace lrmoe::planner
