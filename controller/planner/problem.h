// What a planner sees: exact, current counts, never a forecast; for some comparison policies, past counts.
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
  RoutedCounts counts;         // n[s][e], S == number of ranks
  Cluster cluster;             // one entry per rank
  std::vector<int32_t> owner;  // [E] rank that owns each expert
  // [G] experts a rank already holds beside those it owns, ascending; empty: none anywhere. For a policy that
  // moves owners: the previous layout.
  std::vector<std::vector<int32_t>> resident;
  // [up to 8][E] global counts of the layer's earlier invocations, latest first; empty: none. Only policies
  // that plan from the past read them.
  std::vector<std::vector<int64_t>> history;
  MemoryModelOptions model;
  Policy policy;
};

// InvalidArgument naming the field, its position, its value and the allowed range. Limits: 1..1024 ranks,
// 1..4096 experts, counts 0..2^40 with a total up to 2^40 x ranks, owner in range, residents distinct, not
// owned, within the slots of their rank (for a policy that moves owners: slots and owned experts), up to 8
// invocations of history with one count per expert and totals up to 2^40 x ranks, bandwidths and service
// rates finite and > 0.
absl::Status Validate(const PlanningProblem& problem);

}  // namespace lrmoe::planner
