// From a plan back to the demand it was made of.
#pragma once

#include <cstdint>
#include <vector>

#include "common/counts.h"
#include "common/plan.h"

namespace lrmoe {

// The counts a plan was made of: rows are conserved per source, so a plan holds them. Of a valid plan; any
// thread.
RoutedCounts CountsOf(const LayerPlan& plan);
// N_e: routed pairs of each expert over all sources, [E].
std::vector<int64_t> RoutedRowsByExpert(const LayerPlan& plan);

}  // namespace lrmoe
