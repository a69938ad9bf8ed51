// Plans for engines that run as threads of one process: gathers the counts of all ranks and plans once.
#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "common/counts.h"
#include "controller/planner/problem.h"
#include "worker/engine/plan_provider.h"

namespace lrmoe::testing {

using PlanFunction = std::function<absl::StatusOr<ExecutionPlan>(const Invocation&, const RoutedCounts&)>;

// Thread-safe. Outlives its providers.
class PlanRendezvous {
 public:
  PlanRendezvous(int32_t num_ranks, int32_t num_experts, PlanFunction plan);
  std::unique_ptr<engine::PlanProvider> Provider(int32_t rank);
  std::vector<engine::InvocationReport> Reports(int32_t rank);

 private:
  friend class RendezvousProvider;
  struct Entry {
    RoutedCounts counts;
    int32_t arrived = 0;
    std::vector<bool> here;
    std::shared_ptr<absl::StatusOr<ExecutionPlan>> plan;
  };
  const int32_t num_ranks_, num_experts_;
  const PlanFunction plan_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<Invocation, Entry> entries_;
  std::vector<std::vector<engine::InvocationReport>> reports_;
};

// Plans with the planner of the controller.
PlanFunction PlannerPlans(planner::PlanningProblem problem, Selection selection = Selection::kLrm,
                          RouterGradient router_gradient = RouterGradient::kExact);

// A legal plan that no planner would make: random replicas, random splits of forward rows, random quotas near
// `retention`, and backward rows wherever there is an instance - so that pairs must move.
struct ScriptedPlans {
  uint64_t seed = 0;
  double replica_probability = 0.0;  // of each (expert, other rank)
  double retention = 1.0;            // 1: everything is kept
  bool random_quotas = false;        // else ceil(retention * N_e)
  bool scatter_backward = true;      // false: backward rows fill instances in order, up to their forward rows
  Selection selection = Selection::kLrm;
  RouterGradient router_gradient = RouterGradient::kExact;
  Rescale rescale = Rescale::kOff;

  ExecutionPlan operator()(const Invocation& invocation, const RoutedCounts& counts) const;
};

}  // namespace lrmoe::testing
