// A plan for people: outcome, ranks, replicas, times, and why higher retention rates were rejected.
#pragma once

#include <string>

#include "common/plan.h"

namespace lrmoe::sim {

std::string PlanText(const LayerPlan& plan);

}  // namespace lrmoe::sim
