// The layout of LAER-MoE by itself: its published figures tell of layouts, whose rows then spread by node.
#pragma once

#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {

Copies LaerLayout(const PlanningProblem& problem, const Workload& work);

}  // namespace lrmoe::planner
