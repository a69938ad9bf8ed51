// Plans for engines that are threads of this process, by the controller's planner: the last rank that brings
// its counts plans for all.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "controller/planner/problem.h"
#include "worker/engine/plan_provider.h"
#include "worker/transport/transport.h"

namespace lrmoe::bench {

// Thread-safe. Outlives its providers. Like the controller, takes the replicas of the layer's latest plan for
// resident.
class LocalPlans {
 public:
  // problems[i] is for micro-batch i; counts and residents are filled in here. One layer.
  explicit LocalPlans(std::vector<planner::PlanningProblem> problems) : problems_(std::move(problems)) {}
  std::unique_ptr<engine::PlanProvider> Provider(int32_t rank);
  // For a rank whose peers are other processes, which do the same: gathers the counts over `transport`, which
  // outlives it, and plans by itself.
  std::unique_ptr<engine::PlanProvider> GatheringProvider(transport::Transport* transport);

 private:
  friend class LocalPlanProvider;
  friend class GatheringPlanProvider;
  absl::StatusOr<ExecutionPlan> Meet(const Invocation& invocation, int32_t rank,
                                     std::span<const int64_t> counts, Deadline deadline);
  absl::StatusOr<ExecutionPlan> MakePlan(const Invocation& invocation);

  const std::vector<planner::PlanningProblem> problems_;
  std::mutex mutex_;
  std::condition_variable planned_;
  // Of the invocation that is gathered; no rank begins the next before all have this one's plan, because the
  // engines agree on it. All guarded by mutex_.
  Invocation current_{-1, 0, 0};
  RoutedCounts counts_;
  int32_t arrived_ = 0;
  std::shared_ptr<const absl::StatusOr<ExecutionPlan>> plan_;
  std::vector<std::vector<int32_t>> resident_;  // [G]
};

}  // namespace lrmoe::bench
