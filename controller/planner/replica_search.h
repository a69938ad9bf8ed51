// Chooses replicas: peak load within the tolerance, then the fewest new weight transfers (design,
// "Placement").
#pragma once

#include <cstdint>
#include <vector>

#include "controller/planner/problem.h"
#include "controller/planner/row_flow.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

struct SearchLimits {
  RankCapacity capacity;              // with row limits from memory, before any replica
  std::vector<int64_t> replica_rows;  // [G] rows of memory one replica costs; empty: memory does not limit
  double target_level = 0;            // stop once the peak is at or below
  int64_t effort = 6;                 // edges to look at, per (expert, rank), while the target is missed
};

// Owners and chosen replicas, each with rows to execute; a least-peak allocation. At most replica_slots per
// rank. Residents are free; of new replicas the fewest that suffice and pay; where
// these are many, one more if it lowers the peak a lot.
RowFlow SearchReplicas(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits);

// Owners and, if asked, the residents that have a use; least-peak rows.
RowFlow KeepReplicas(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits,
                     bool residents);

}  // namespace lrmoe::planner
