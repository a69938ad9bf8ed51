#include "tools/sim/figure_workload.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/status_macros.h"
#include "common/synthetic_routing.h"
#include "controller/planner/planner.h"
#include "controller/planner/policies/policies.h"

namespace lrmoe::sim {
namespace {

constexpr int kWarmUp = 2, kMeasured = 2;

// LRMoE's bar of Figure 8.
constexpr double kPaperRate = 0.7, kPaperComputeMs = 7.26, kPaperDispatchMs = 2.58, kPaperCombineMs = 2.85;

double MeanKeptRows() {
  return kPaperRate * static_cast<double>(kFigureTokens * kFigureTopK);
}

SyntheticOptions Routing(double alpha, uint64_t seed, int64_t tokens) {
  SyntheticOptions out;
  out.workload = {SyntheticKind::kZipf, alpha};
  out.num_experts = kFigureExperts;
  out.num_ranks = kFigureRanks;
  out.tokens_per_rank = tokens;
  out.top_k = kFigureTopK;
  out.seed = seed;
  return out;
}

double OwnerImbalance(const RoutedCounts& counts) {
  const std::vector<int32_t> owner = ContiguousOwners(kFigureExperts, kFigureRanks);
  std::vector<int64_t> load(kFigureRanks, 0);
  int64_t total = 0;
  for (int32_t s = 0; s < kFigureRanks; ++s)
    for (int32_t e = 0; e < kFigureExperts; ++e) load[owner[e]] += counts.at(s, e), total += counts.at(s, e);
  return static_cast<double>(*std::ranges::max_element(load)) * kFigureRanks / static_cast<double>(total);
}

planner::PlanningProblem MakeProblem(const FigureOptions& options, const FigureCase& which) {
  planner::PlanningProblem problem;
  problem.owner = ContiguousOwners(kFigureExperts, kFigureRanks);
  RankResources rank;
  rank.replica_slots = options.replica_slots;
  if (which.memory_bytes > 0) rank.memory_bytes = which.memory_bytes;
  // A row's forward and backward GEMMs: three times 2 x 3 H F operations.
  const double operations = 3.0 * 2 * 3 * problem.model.hidden_size * problem.model.intermediate_size;
  rank.rows_per_ms = ComputeTflops() * 1e9 / operations;
  problem.cluster.ranks.assign(kFigureRanks, rank);
  problem.cluster.bandwidth = {LinkGbPerS(), LinkGbPerS()};
  problem.policy.planner = which.policy;
  problem.policy.rates = which.rates;
  problem.policy.on_infeasible = OnInfeasible::kBestEffort;
  return problem;
}

std::vector<int64_t> GlobalCounts(const RoutedCounts& counts) {
  std::vector<int64_t> out(counts.num_experts(), 0);
  for (int32_t s = 0; s < counts.num_sources(); ++s)
    for (int32_t e = 0; e < counts.num_experts(); ++e) out[e] += counts.at(s, e);
  return out;
}

}  // namespace

double ComputeTflops() {
  const MemoryModelOptions model;
  const double operations = 2.0 * 2 * 3 * model.hidden_size * model.intermediate_size;
  return MeanKeptRows() * operations / (kPaperComputeMs * 1e9);
}

double LinkGbPerS() {
  const MemoryModelOptions model;
  const double bytes = MeanKeptRows() * (kFigureRanks - 1) / kFigureRanks *
                       static_cast<double>(model.hidden_size * model.weight_bytes);
  return 2 * bytes / ((kPaperDispatchMs + kPaperCombineMs) * 1e6);
}

bool DropsRows(const std::string& policy) {
  return policy == "lrmoe" || policy == "proportional" || policy == "waterfill";
}

int64_t TokensOfUnit() {
  const MemoryCoefficients memory = ComputeMemoryCoefficients(MemoryModelOptions());
  int64_t low = 0, high = int64_t{1} << 32;  // pairs per rank
  while (low + 1 < high) {
    RankWork work;
    work.source_pairs = work.forward_rows = work.kept_rows = (low + high) / 2;
    const MemoryBytes bytes = PredictMemory(memory, work);
    (bytes.tokens + bytes.staging <= kFigureBudget ? low : high) = work.forward_rows;
  }
  return static_cast<int64_t>(static_cast<double>(low) / (kFigureTopK * kIdealLimit));
}

absl::StatusOr<double> SolveAlpha(double imbalance, uint64_t seed) {
  const auto at = [&](double alpha) {
    return OwnerImbalance(SyntheticCounts(Routing(alpha, seed, kFigureTokens), 0, 0));
  };
  constexpr double kStep = 0.05;
  double low = 0;
  while (at(low + kStep) < imbalance) {
    low += kStep;
    if (low > 10)
      return absl::InvalidArgumentError(absl::StrCat("imbalance is ", imbalance,
                                                     "; allowed: what Zipf popularity with seed ", seed,
                                                     " reaches, at most ", at(10)));
  }
  double high = low + kStep;
  for (int i = 0; i < 40; ++i) {
    const double middle = (low + high) / 2;
    (at(middle) < imbalance ? low : high) = middle;
  }
  return high;
}

absl::StatusOr<std::vector<PlannedStep>> PlanSteps(const FigureOptions& options, const FigureCase& which) {
  const planner::PolicyInfo* policy = planner::FindPolicy(which.policy);
  if (policy == nullptr)
    return absl::InvalidArgumentError(absl::StrCat("policy is \"", which.policy, "\", which is none"));
  planner::PlanningProblem problem = MakeProblem(options, which);
  std::vector<PlannedStep> out;
  for (int64_t step = 1; step <= kWarmUp + kMeasured; ++step) {
    problem.counts = SyntheticCounts(Routing(which.alpha, which.seed, which.tokens), step, 0);
    LRMOE_ASSIGN_OR_RETURN(LayerPlan plan, planner::Plan(problem));
    LRMOE_RETURN_IF_ERROR(planner::CheckPlan(problem, plan));
    if (step > kWarmUp) out.push_back({problem, plan});
    if (policy->uses_history) problem.history.insert(problem.history.begin(), GlobalCounts(problem.counts));
    if (!options.keep_residents || policy->ideal) continue;
    problem.resident.assign(kFigureRanks, {});
    for (const InstancePlan& instance : plan.instances)
      if (!instance.owner) problem.resident[instance.rank_idx].push_back(instance.expert_idx);
  }
  return out;
}

absl::StatusOr<std::vector<FigureSeed>> SolveSeeds(const FigureOptions& options) {
  std::vector<FigureSeed> out;
  for (int32_t i = 0; i < options.num_seeds; ++i) {
    FigureSeed& seed = out.emplace_back();
    seed.seed = options.seed + static_cast<uint64_t>(i);
    LRMOE_ASSIGN_OR_RETURN(seed.alpha, SolveAlpha(options.imbalance, seed.seed));
  }
  return out;
}

std::vector<std::string> Assumptions(const FigureOptions& options, const std::vector<FigureSeed>& seeds) {
  double low = seeds[0].alpha, high = low;
  for (const FigureSeed& seed : seeds) low = std::min(low, seed.alpha), high = std::max(high, seed.alpha);
  return {
      "shape, from the paper: 8 ranks, 128 experts, top 8, H 2048, F 768, bf16, 32,768 tokens per rank",
      absl::StrFormat(
          "skew: Zipf popularity in seeded order, exponent solved so that fixed ownership has "
          "imbalance %.3g (%.2f..%.2f for %d seeds). The paper gives no skew; its Figure 7 implies "
          "12.46 / 7.55 = 1.65 if UltraEP is balanced, Figure 8 gives 29.64 / (12.69 / 0.7) = 1.63 "
          "from LRMoE at 70 %%, Figure 6 gives 80.0 / 40.0 = 2.0",
          options.imbalance, low, high, options.num_seeds),
      "steps: popularity stays, each source and step sees it with noise of up to 20 %; two steps of warm-up, "
      "then "
      "two are measured; policies that plan from the past get it",
      absl::StrFormat("every rank has %d replica slots under every policy; %s", options.replica_slots,
                      options.keep_residents ? "replicas of the last plan are there already"
                                             : "no replica outlives its invocation"),
      "memory: the engine's own model (common/memory_model), tested against the engine; the paper's token "
      "buffers are 1.3 to 1.6 times as large",
      absl::StrFormat(
          "time: %.0f TFLOP/s and %.0f GB/s per direction for all policies, from LRMoE's bar of "
          "Figure 8 at 70 %% of the rows and perfect balance; the other bars follow from their rows",
          ComputeTflops(), LinkGbPerS()),
  };
}

}  // namespace lrmoe::sim
