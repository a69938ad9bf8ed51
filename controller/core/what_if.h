// "What would have been planned with other settings": from a recorded plan to a planning problem. Pure.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "controller/core/core.h"
#include "controller/core/history.h"
#include "controller/planner/problem.h"

namespace lrmoe::core {

struct WhatIf {
  Policy policy;                               // complete, but for its planner
  std::string planner;                         // empty: the recorded plan's
  int32_t ranks = 0;                           // 0: as recorded
  std::optional<int64_t> memory_budget_bytes;  // per rank, over all layers; 0: unlimited
  std::optional<int32_t> replica_slots;        // per rank and layer
  bool no_residents = false;                   // as if no rank held a replica
};

// The recorded counts with what is known of the job. Residents are the replicas that the recorded plan found
// there and used. With more ranks than the job has the cluster is repeated on further nodes, with fewer its
// first ranks are taken; both start without residents. FailedPrecondition when no plan was made of `record`,
// or no job is known any more.
absl::StatusOr<planner::PlanningProblem> MakeWhatIfProblem(const Core& core, const History& history,
                                                           const PlanRecord& record, const WhatIf& change);

}  // namespace lrmoe::core
