#include "tools/bench/local_plans.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/check.h"
#include "common/status_macros.h"
#include "controller/planner/planner.h"

namespace lrmoe::bench {

class LocalPlanProvider : public engine::PlanProvider {
 public:
  LocalPlanProvider(LocalPlans* plans, int32_t rank) : plans_(plans), rank_(rank) {}
  absl::StatusOr<ExecutionPlan> Plan(const Invocation& invocation, std::span<const int64_t> counts,
                                     Deadline deadline) override {
    return plans_->Meet(invocation, rank_, counts, deadline);
  }
  void Report(const engine::InvocationReport&) override {}  // the engine's results hold it as well

 private:
  LocalPlans* plans_;
  int32_t rank_;
};

class GatheringPlanProvider : public engine::PlanProvider {
 public:
  GatheringPlanProvider(LocalPlans* plans, transport::Transport* transport)
      : plans_(plans), transport_(transport) {}
  absl::StatusOr<ExecutionPlan> Plan(const Invocation& invocation, std::span<const int64_t> counts,
                                     Deadline deadline) override {
    std::vector<int64_t> all(counts.size() * transport_->size());
    LRMOE_RETURN_IF_ERROR(transport_->AllGather({"counts", invocation, deadline}, std::as_bytes(counts),
                                                std::as_writable_bytes(std::span(all))));
    std::lock_guard lock(plans_->mutex_);
    plans_->counts_ = RoutedCounts(transport_->size(), static_cast<int32_t>(counts.size()));
    for (int32_t r = 0; r < transport_->size(); ++r)
      std::copy_n(all.begin() + static_cast<int64_t>(r * counts.size()), counts.size(),
                  plans_->counts_.source(r).begin());
    return plans_->MakePlan(invocation);
  }
  void Report(const engine::InvocationReport&) override {}

 private:
  LocalPlans* plans_;
  transport::Transport* transport_;
};

std::unique_ptr<engine::PlanProvider> LocalPlans::GatheringProvider(transport::Transport* transport) {
  return std::make_unique<GatheringPlanProvider>(this, transport);
}

std::unique_ptr<engine::PlanProvider> LocalPlans::Provider(int32_t rank) {
  return std::make_unique<LocalPlanProvider>(this, rank);
}

absl::StatusOr<ExecutionPlan> LocalPlans::Meet(const Invocation& invocation, int32_t rank,
                                               std::span<const int64_t> counts, Deadline deadline) {
  const auto num_ranks = static_cast<int32_t>(problems_[0].cluster.ranks.size());
  std::unique_lock lock(mutex_);
  if (current_ != invocation) {
    current_ = invocation;
    counts_ = RoutedCounts(num_ranks, static_cast<int32_t>(counts.size()));
    arrived_ = 0;
    plan_ = nullptr;
  }
  std::copy(counts.begin(), counts.end(), counts_.source(rank).begin());
  if (++arrived_ == num_ranks) {
    plan_ = std::make_shared<absl::StatusOr<ExecutionPlan>>(MakePlan(invocation));
    planned_.notify_all();
  }
  if (!planned_.wait_until(lock, deadline, [&] { return plan_ != nullptr; }))
    return absl::UnavailableError("no plan: not all ranks brought their counts in time");
  return *plan_;
}

absl::StatusOr<ExecutionPlan> LocalPlans::MakePlan(const Invocation& invocation) {
  LRMOE_CHECK_LT(invocation.micro_batch, static_cast<int32_t>(problems_.size()));
  planner::PlanningProblem problem = problems_[invocation.micro_batch];
  problem.counts = counts_;
  problem.resident = resident_;
  const auto start = std::chrono::steady_clock::now();
  LRMOE_ASSIGN_OR_RETURN(LayerPlan plan, planner::Plan(problem));
  plan.plan_us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  plan.invocation = invocation;
  resident_.assign(problem.cluster.ranks.size(), {});
  for (const InstancePlan& instance : plan.instances)  // ordered by expert
    if (!instance.owner) resident_[instance.rank_idx].push_back(instance.expert_idx);
  return ExecutionPlan{std::move(plan), problem.policy.selection, problem.policy.router_gradient,
                       problem.policy.seed, problem.policy.rescale};
}

}  // namespace lrmoe::bench
