// The plan of one layer invocation: placement, quotas and allocations, with what was predicted and what was
// rejected.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "common/ids.h"
#include "common/memory_model.h"
#include "common/policy.h"

namespace lrmoe {

// An instance: a copy of an expert on a rank, with the rows it executes.
struct InstancePlan {
  int32_t expert_idx = 0;
  int32_t rank_idx = 0;
  bool owner = false;
  bool is_new = false;                          // a replica whose weights the rank does not hold yet
  int64_t forward_rows = 0;                     // F[e][i]
  int64_t backward_rows = 0;                    // X[e][i]
  std::vector<int64_t> forward_rows_by_source;  // [S]; sums to forward_rows
  bool operator==(const InstancePlan&) const = default;
};

struct RankPlan {
  int64_t forward_rows = 0;
  int64_t backward_rows = 0;
  MemoryBytes memory_bytes;
  bool operator==(const RankPlan&) const = default;
};

struct ImbalanceSummary {  // most loaded rank over the mean; 1.0 when there are no rows
  double before = 1.0;     // under fixed ownership
  double forward = 1.0;
  double backward = 1.0;
  bool operator==(const ImbalanceSummary&) const = default;
};

struct PredictedTime {  // microseconds, critical rank
  double weights = 0;
  double dispatch = 0;
  double compute = 0;
  double return_ = 0;
  double gradients = 0;
  bool operator==(const PredictedTime&) const = default;
};

// Why a candidate retention rate was not admitted.
struct RejectedCandidate {
  double retention_rate = 0;
  std::string constraint;  // "memory" | "window" | "retention_floor" | "placement"
  std::string where;       // "rank 3", "link 2 -> 5", "expert 7", ...
  double needed = 0;
  double available = 0;
  std::string unit;  // "bytes", "us", "rows"
  bool operator==(const RejectedCandidate&) const = default;
};

struct LayerPlan {
  Invocation invocation;
  std::string policy;    // planner name
  bool feasible = true;  // false only under on_infeasible = best_effort
  double retention_rate = 1.0;
  std::vector<int64_t> quota;           // K_e, [E]
  std::vector<InstancePlan> instances;  // ordered by (expert_idx, owner first, rank_idx)
  std::vector<RankPlan> ranks;          // [G]
  ImbalanceSummary imbalance;
  int32_t new_replicas = 0;
  PredictedTime predicted_us;
  std::vector<RejectedCandidate> rejected;
  double plan_us = 0;  // time it took to plan; measured by the caller of the planner, not part of its result
  bool operator==(const LayerPlan&) const = default;
};

// What a worker executes: the plan and the policy settings that must be equal on all ranks for this
// invocation.
struct ExecutionPlan {
  LayerPlan plan;
  Selection selection = Selection::kLrm;
  RouterGradient router_gradient = RouterGradient::kExact;
  uint64_t seed = 0;  // for Selection::kRandom and kLrmSampled
  Rescale rescale = Rescale::kOff;
  bool operator==(const ExecutionPlan&) const = default;
};

}  // namespace lrmoe
