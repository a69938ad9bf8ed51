// The placement of lrmoe, for policies that differ from it in their quotas only.
#pragma once

#include "controller/planner/candidate_loop.h"

namespace lrmoe::planner {

// How lrmoe takes part in Algorithm 1. `problem` and `work` have to outlive the hooks.
PolicyHooks LrmoeHooks(const PlanningProblem& problem, const Workload& work);

}  // namespace lrmoe::planner
