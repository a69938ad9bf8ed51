// Recorded or generated routing through planning policies: what each would have done to every invocation.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/memory_model.h"
#include "common/plan.h"
#include "common/policy.h"
#include "common/trace.h"
#include "controller/planner/policies/policies.h"
#include "controller/planner/problem.h"
#include "tools/sim/statistics.h"

namespace lrmoe::sim {

struct ReplayOptions {
  std::vector<std::string> policies = {"lrmoe", "fixed"};
  int32_t num_ranks = 0;  // 0: as many as the trace has sources
  int32_t ranks_per_node = 8;
  RankResources rank;  // of every rank; the node follows from ranks_per_node
  Bandwidth bandwidth;
  MemoryModelOptions model;
  Policy policy;  // balance_tolerance, rates, ...; its planner is not read
  // The replicas of a layer's previous plan are there already when its next one is made.
  bool keep_residents = true;
};

// What one policy did with all invocations.
struct PolicyOutcome {
  std::string policy;
  int64_t invocations = 0;
  int64_t infeasible = 0;  // among them: no candidate fitted, the lowest was planned all the same
  Distribution imbalance_forward, imbalance_backward;
  Distribution new_replicas, retention_rate;
  Distribution fan_out;                // most new replicas that one rank sends
  Distribution remote_share;           // forward rows executed away from their source
  Distribution predicted_us;           // all components of the critical rank
  Distribution memory_bytes;           // of the fullest rank
  Distribution plan_us, plan_wall_us;  // processor time of the planning thread, and wall time
  std::vector<double> load;            // [G] mean of a rank's forward rows over the mean rank's
  std::vector<double> peak_load;       // [G] the largest such ratio
  Series imbalance_series, retention_series;
};

// Feed it the invocations of one trace in order. Memory does not grow with their number.
class Replay {
 public:
  // InvalidArgument for unknown policies and settings out of range.
  static absl::StatusOr<Replay> Create(const ReplayOptions& options, const TraceHeader& header);

  // Plans one invocation with every policy and checks every plan. Errors name invocation and policy.
  absl::Status Add(const TraceRecord& record);

  int32_t num_ranks() const { return static_cast<int32_t>(problem_.cluster.ranks.size()); }
  int64_t invocations() const { return invocations_; }
  const Distribution& imbalance_before() const { return imbalance_before_; }
  const std::vector<PolicyOutcome>& outcomes() const { return outcomes_; }

 private:
  // Of one layer: [policy][G] replicas of the previous plan, and past global counts, latest first.
  struct Layer {
    std::vector<std::vector<std::vector<int32_t>>> resident;
    std::deque<std::vector<int64_t>> history;
  };
  Replay() = default;
  absl::Status PlanWith(size_t policy_idx, Layer& layer);
  void Note(const LayerPlan& plan, PolicyOutcome& outcome);

  ReplayOptions options_;
  planner::PlanningProblem problem_;
  std::vector<const planner::PolicyInfo*> policies_;
  std::vector<Layer> layers_;
  std::vector<PolicyOutcome> outcomes_;
  Distribution imbalance_before_;
  int64_t invocations_ = 0;
};

}  // namespace lrmoe::sim
