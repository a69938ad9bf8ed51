#include "controller/plan_place.h"

#include <algorithm>

namespace lrmoe {

bool PlanPlace::Past::Fits(const planner::PlanningProblem& problem) const {
  return experts == problem.counts.num_experts() && ranks == problem.counts.num_sources() &&
         planner == problem.policy.planner;
}

bool PlanPlace::OnLoop(int32_t layer, const planner::PlanningProblem& problem) const {
  const auto found = past_.find(layer);
  return found != past_.end() && found->second.quick >= kEnough && found->second.Fits(problem);
}

void PlanPlace::Took(int32_t layer, const planner::PlanningProblem& problem, double cpu_us) {
  Past& past = past_[layer];
  if (!past.Fits(problem))
    past = {problem.counts.num_experts(), problem.counts.num_sources(), problem.policy.planner, 0};
  const bool quick = cpu_us <= static_cast<double>(max_loop_us_);
  past.quick = quick ? std::min(past.quick + 1, kEnough) : 0;
}

}  // namespace lrmoe
