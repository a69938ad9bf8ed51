// What a planner sees: exact, current counts, never a forecast.
#pragma once

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/cluster.h"
#include "common/counts.h"
#include "common/memory_model.h"
#include "common/policy.h"

namespace lrmoe::planner {

struct PlanningProblem {
  RoutedCounts counts;                         // n[s][e], S == number of ranks
  Cluster cluster;                             // one entry per rank
  std::vector<int32_t> owner;                  // [E] rank that owns each expert
  std::vector<std::vector<int32_t>> resident;  // [G] experts a rank already holds as replicas, ascending
  MemoryModelOptions model;
  Policy policy;
};

// InvalidArgument naming the field, its position, its value and the allowed range. Limits: 1..1024 ranks,
// 1..4096 experts, counts 0..2^40 with a total up to 2^40 x ranks, owner in range, residents distinct, not
// owned, within the slots of their rank, bandwidths and service rates finite and > 0.
absl::Status Validate(const PlanningProblem& problem);

}  // namespace lrmoe::planner
