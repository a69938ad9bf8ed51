#include "tools/sim/replay.h"

#include <time.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/regroup.h"
#include "common/status_macros.h"
#include "controller/planner/planner.h"
#include "tools/sim/trace_source.h"

namespace lrmoe::sim {
namespace {

constexpr size_t kHistory = 8;  // what a planning problem takes

double ClockUs(clockid_t clock) {
  timespec now;
  clock_gettime(clock, &now);
  return static_cast<double>(now.tv_sec) * 1e6 + static_cast<double>(now.tv_nsec) * 1e-3;
}

std::vector<int64_t> GlobalCounts(const RoutedCounts& counts) {
  std::vector<int64_t> out(counts.num_experts(), 0);
  for (int32_t s = 0; s < counts.num_sources(); ++s)
    for (int32_t e = 0; e < counts.num_experts(); ++e) out[e] += counts.at(s, e);
  return out;
}

// What each rank holds after a plan beyond the experts it owns, ascending.
std::vector<std::vector<int32_t>> Replicas(const LayerPlan& plan) {
  std::vector<std::vector<int32_t>> out(plan.ranks.size());
  for (const InstancePlan& instance : plan.instances)
    if (!instance.owner) out[instance.rank_idx].push_back(instance.expert_idx);
  return out;
}

}  // namespace

absl::StatusOr<Replay> Replay::Create(const ReplayOptions& options, const TraceHeader& header) {
  Replay out;
  out.options_ = options;
  const int32_t num_ranks = options.num_ranks > 0 ? options.num_ranks : header.num_source_ranks;
  if (num_ranks > 1024)
    return absl::InvalidArgumentError(absl::StrCat("ranks is ", num_ranks, "; allowed: 1..1024"));
  for (const std::string& name : options.policies) {
    const planner::PolicyInfo* policy = planner::FindPolicy(name);
    if (policy == nullptr) {
      const auto known = planner::AllPolicies();
      return absl::InvalidArgumentError(absl::StrCat(
          "policy is \"", name,
          "\"; allowed: ", absl::StrJoin(known, ", ", [](std::string* text, const planner::PolicyInfo& info) {
            absl::StrAppend(text, info.name);
          })));
    }
    out.policies_.push_back(policy);
    PolicyOutcome& outcome = out.outcomes_.emplace_back();
    outcome.policy = name;
    outcome.load.assign(num_ranks, 0);
    outcome.peak_load.assign(num_ranks, 0);
  }
  planner::PlanningProblem& problem = out.problem_;
  problem.counts = RoutedCounts(num_ranks, header.num_experts);
  problem.owner = ContiguousOwners(header.num_experts, num_ranks);
  problem.cluster.ranks.assign(num_ranks, options.rank);
  for (int32_t g = 0; g < num_ranks; ++g) problem.cluster.ranks[g].node = g / options.ranks_per_node;
  problem.cluster.bandwidth = options.bandwidth;
  problem.model = options.model;
  problem.policy = options.policy;
  problem.policy.planner = "fixed";
  problem.policy.on_infeasible = OnInfeasible::kBestEffort;
  LRMOE_RETURN_IF_ERROR(planner::Validate(problem));
  out.layers_.resize(header.num_layers);
  return out;
}

absl::Status Replay::Add(const TraceRecord& record) {
  problem_.counts = RegroupSources(record.counts, num_ranks());
  Layer& layer = layers_[record.invocation.layer];
  layer.resident.resize(policies_.size());
  for (size_t i = 0; i < policies_.size(); ++i) {
    const absl::Status status = PlanWith(i, layer);
    if (!status.ok())
      return {status.code(), absl::StrCat(ToString(record.invocation), ", policy ", outcomes_[i].policy, ": ",
                                          status.message())};
  }
  std::vector<int64_t> counts = GlobalCounts(problem_.counts);
  std::vector<int64_t> load(num_ranks(), 0);
  int64_t total = 0, peak = 0;
  for (size_t e = 0; e < counts.size(); ++e) {
    total += counts[e];
    peak = std::max(peak, load[problem_.owner[e]] += counts[e]);
  }
  imbalance_before_.Add(total > 0 ? static_cast<double>(peak) * num_ranks() / static_cast<double>(total) : 1);
  if (layer.history.size() == kHistory) layer.history.pop_back();
  layer.history.push_front(std::move(counts));
  ++invocations_;
  return absl::OkStatus();
}

absl::Status Replay::PlanWith(size_t policy_idx, Layer& layer) {
  const planner::PolicyInfo& policy = *policies_[policy_idx];
  PolicyOutcome& outcome = outcomes_[policy_idx];
  problem_.policy.planner = std::string(policy.name);
  problem_.resident = layer.resident[policy_idx];
  problem_.history.clear();
  if (policy.uses_history) problem_.history.assign(layer.history.begin(), layer.history.end());

  const double cpu = ClockUs(CLOCK_THREAD_CPUTIME_ID), wall = ClockUs(CLOCK_MONOTONIC);
  LRMOE_ASSIGN_OR_RETURN(const LayerPlan plan, planner::Plan(problem_));
  outcome.plan_us.Add(ClockUs(CLOCK_THREAD_CPUTIME_ID) - cpu);
  outcome.plan_wall_us.Add(ClockUs(CLOCK_MONOTONIC) - wall);
  LRMOE_RETURN_IF_ERROR(planner::CheckPlan(problem_, plan));
  Note(plan, outcome);
  if (options_.keep_residents && !policy.ideal) layer.resident[policy_idx] = Replicas(plan);
  return absl::OkStatus();
}

void Replay::Note(const LayerPlan& plan, PolicyOutcome& outcome) {
  ++outcome.invocations;
  outcome.infeasible += !plan.feasible;
  outcome.imbalance_forward.Add(plan.imbalance.forward);
  outcome.imbalance_backward.Add(plan.imbalance.backward);
  outcome.imbalance_series.Add(plan.imbalance.forward);
  outcome.new_replicas.Add(plan.new_replicas);
  outcome.retention_rate.Add(plan.retention_rate);
  outcome.retention_series.Add(plan.retention_rate);
  const PredictedTime& time = plan.predicted_us;
  outcome.predicted_us.Add(time.weights + time.dispatch + time.compute + time.return_ + time.gradients);

  std::vector<int32_t> sent(num_ranks(), 0);
  int32_t fan_out = 0;
  double rows = 0, remote = 0;
  for (const InstancePlan& instance : plan.instances) {
    if (instance.is_new) fan_out = std::max(fan_out, ++sent[problem_.owner[instance.expert_idx]]);
    const auto all = static_cast<double>(instance.forward_rows);
    rows += all;
    remote += all - static_cast<double>(instance.forward_rows_by_source[instance.rank_idx]);
  }
  outcome.fan_out.Add(fan_out);
  outcome.remote_share.Add(rows > 0 ? remote / rows : 0);

  int64_t fullest = 0;
  const double mean = rows / num_ranks();
  for (int32_t g = 0; g < num_ranks(); ++g) {
    const double load = rows > 0 ? static_cast<double>(plan.ranks[g].forward_rows) / mean : 1;
    const auto before = static_cast<double>(outcome.invocations - 1);
    outcome.load[g] += (load - outcome.load[g]) / (before + 1);
    outcome.peak_load[g] = std::max(outcome.peak_load[g], load);
    fullest = std::max(fullest, plan.ranks[g].memory_bytes.total());
  }
  outcome.memory_bytes.Add(static_cast<double>(fullest));
}

}  // namespace lrmoe::sim
