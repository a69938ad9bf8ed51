#include "tests/support/engine/plan_rendezvous.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cluster.h"
#include "common/random.h"
#include "controller/planner/planner.h"

namespace lrmoe::testing {

class RendezvousProvider : public engine::PlanProvider {
 public:
  RendezvousProvider(PlanRendezvous* rendezvous, int32_t rank) : rendezvous_(rendezvous), rank_(rank) {}

  absl::StatusOr<ExecutionPlan> Plan(const Invocation& invocation, std::span<const int64_t> counts,
                                     Deadline deadline) override {
    PlanRendezvous& r = *rendezvous_;
    std::unique_lock lock(r.mutex_);
    PlanRendezvous::Entry& entry = r.entries_[invocation];
    if (entry.here.empty()) {
      entry.counts = RoutedCounts(r.num_ranks_, r.num_experts_);
      entry.here.assign(r.num_ranks_, false);
    }
    if (!entry.here[rank_]) {
      std::copy(counts.begin(), counts.end(), entry.counts.source(rank_).begin());
      entry.here[rank_] = true;
      if (++entry.arrived == r.num_ranks_) {
        entry.plan = std::make_shared<absl::StatusOr<ExecutionPlan>>(r.plan_(invocation, entry.counts));
        r.changed_.notify_all();
      }
    }
    if (!r.changed_.wait_until(lock, deadline, [&] { return entry.plan != nullptr; }))
      return absl::UnavailableError(
          absl::StrCat("no plan: ", entry.arrived, " of ", r.num_ranks_, " counts arrived"));
    return *entry.plan;
  }

  void Report(const engine::InvocationReport& report) override {
    std::unique_lock lock(rendezvous_->mutex_);
    rendezvous_->reports_[rank_].push_back(report);
  }

 private:
  PlanRendezvous* rendezvous_;
  int32_t rank_;
};

PlanRendezvous::PlanRendezvous(int32_t num_ranks, int32_t num_experts, PlanFunction plan)
    : num_ranks_(num_ranks), num_experts_(num_experts), plan_(std::move(plan)), reports_(num_ranks) {}

std::unique_ptr<engine::PlanProvider> PlanRendezvous::Provider(int32_t rank) {
  return std::make_unique<RendezvousProvider>(this, rank);
}

std::vector<engine::InvocationReport> PlanRendezvous::Reports(int32_t rank) {
  std::unique_lock lock(mutex_);
  return reports_[rank];
}

PlanFunction PlannerPlans(planner::PlanningProblem problem, Selection selection,
                          RouterGradient router_gradient) {
  return [problem = std::move(problem), selection, router_gradient](
             const Invocation& invocation, const RoutedCounts& counts) -> absl::StatusOr<ExecutionPlan> {
    planner::PlanningProblem now = problem;
    now.counts = counts;
    absl::StatusOr<LayerPlan> plan = planner::Plan(now);
    if (!plan.ok()) return plan.status();
    plan->invocation = invocation;
    return ExecutionPlan{*std::move(plan), selection, router_gradient, problem.policy.seed,
                         problem.policy.rescale};
  };
}

ExecutionPlan ScriptedPlans::operator()(const Invocation& invocation, const RoutedCounts& counts) const {
  Random random(
      seed + static_cast<uint64_t>(invocation.step * 7919 + invocation.micro_batch * 31 + invocation.layer));
  const int32_t num_ranks = counts.num_sources(), num_experts = counts.num_experts();
  const std::vector<int32_t> owner = ContiguousOwners(num_experts, num_ranks);
  LayerPlan plan;
  plan.invocation = invocation;
  plan.policy = "scripted";
  plan.retention_rate = retention;
  plan.quota.assign(num_experts, 0);
  plan.ranks.resize(num_ranks);
  for (int32_t e = 0; e < num_experts; ++e) {
    std::vector<InstancePlan> instances{{e, owner[e], true, false, 0, 0, std::vector<int64_t>(num_ranks, 0)}};
    for (int32_t r = 0; r < num_ranks; ++r)
      if (r != owner[e] && random.Uniform() < replica_probability)
        instances.push_back({e, r, false, true, 0, 0, std::vector<int64_t>(num_ranks, 0)});
    int64_t routed = 0;
    for (int32_t s = 0; s < num_ranks; ++s) {
      int64_t left = counts.at(s, e);
      routed += left;
      for (size_t i = 0; i < instances.size(); ++i) {
        const int64_t rows = i + 1 == instances.size() ? left : random.Between(0, left);
        instances[i].forward_rows_by_source[s] = rows;
        instances[i].forward_rows += rows;
        left -= rows;
      }
    }
    int64_t quota = static_cast<int64_t>(std::ceil(retention * static_cast<double>(routed)));
    if (random_quotas && retention < 1.0) quota = random.Between(0, routed);
    plan.quota[e] = quota;
    int64_t left = quota;
    for (size_t i = 0; i < instances.size(); ++i) {
      int64_t rows = std::min(left, instances[i].forward_rows);
      if (scatter_backward) rows = i + 1 == instances.size() ? left : random.Between(0, left);
      instances[i].backward_rows = rows;
      left -= rows;
    }
    for (InstancePlan& instance : instances) {
      plan.ranks[instance.rank_idx].forward_rows += instance.forward_rows;
      plan.ranks[instance.rank_idx].backward_rows += instance.backward_rows;
      plan.new_replicas += !instance.owner;
      plan.instances.push_back(std::move(instance));
    }
  }
  return {std::move(plan), selection, router_gradient, seed, rescale};
}

}  // namespace lrmoe::testing
