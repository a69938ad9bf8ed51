#include "tools/sim/figures.h"

#include <algorithm>
#include <map>

#include "common/status_macros.h"

namespace lrmoe::sim {
namespace {

constexpr double kMostMultiplier = 64;

double PaperFigure(const std::map<std::string, double>& figures, const std::string& policy) {
  const auto found = figures.find(policy);
  return found == figures.end() ? 0 : found->second;
}

std::vector<double> RatesOf(const FigureOptions& options, const std::string& policy) {
  return {DropsRows(policy) ? options.retention : 1.0};
}

// Plans of every seed under a policy, without a memory limit.
absl::StatusOr<std::vector<PlannedStep>> AllSteps(const FigureOptions& options,
                                                  const std::vector<FigureSeed>& seeds,
                                                  const std::string& policy) {
  std::vector<PlannedStep> out;
  for (const FigureSeed& seed : seeds) {
    FigureCase which{policy, seed.seed, seed.alpha, kFigureTokens, 0, RatesOf(options, policy)};
    LRMOE_ASSIGN_OR_RETURN(std::vector<PlannedStep> steps, PlanSteps(options, which));
    std::ranges::move(steps, std::back_inserter(out));
  }
  return out;
}

// A policy with one seed in the budget.
class Admission {
 public:
  Admission(const FigureOptions& options, const FigureSeed& seed, const std::string& policy)
      : options_(options), unit_(static_cast<double>(TokensOfUnit())) {
    which_.policy = policy;
    which_.seed = seed.seed;
    which_.alpha = seed.alpha;
    if (DropsRows(policy)) which_.rates = Policy().rates;
    RankWork base;
    base.owned_experts = kFigureExperts / kFigureRanks;
    which_.memory_bytes =
        kFigureBudget + PredictMemory(ComputeMemoryCoefficients(MemoryModelOptions()), base).experts;
  }

  absl::StatusOr<std::vector<PlannedStep>> At(double multiplier) {
    which_.tokens = static_cast<int64_t>(multiplier * unit_);
    return PlanSteps(options_, which_);
  }

  absl::StatusOr<bool> Fits(double multiplier) {
    LRMOE_ASSIGN_OR_RETURN(const std::vector<PlannedStep> steps, At(multiplier));
    return std::ranges::all_of(steps, [](const PlannedStep& step) { return step.plan.feasible; });
  }

  absl::StatusOr<double> Largest() {
    double low = 0, high = kMostMultiplier;
    while (high - low > 0.01) {
      const double middle = (low + high) / 2;
      LRMOE_ASSIGN_OR_RETURN(const bool fits, Fits(middle));
      (fits ? low : high) = middle;
    }
    return low;
  }

 private:
  const FigureOptions& options_;
  const double unit_;
  FigureCase which_;
};

absl::StatusOr<ThroughputRow> MakeThroughputRow(const FigureOptions& options,
                                                const std::vector<FigureSeed>& seeds,
                                                const std::string& policy,
                                                const std::vector<double>& multipliers) {
  ThroughputRow row;
  row.policy = policy;
  row.paper_percent = PaperFigure(
      {{"lrmoe", 100}, {"ultraep", 58.4}, {"symi", 44.9}, {"fixed", 40.0}, {"ideal", 80.0}}, policy);
  row.percent.assign(multipliers.size(), 0);
  const double share = 1.0 / static_cast<double>(seeds.size());
  for (const FigureSeed& seed : seeds) {
    Admission admission(options, seed, policy);
    LRMOE_ASSIGN_OR_RETURN(const double largest, admission.Largest());
    row.largest_multiplier += share * largest;
    for (size_t i = 0; i < multipliers.size(); ++i)
      row.percent[i] += share * 100 * std::min(1.0, largest / multipliers[i]);
    LRMOE_ASSIGN_OR_RETURN(const auto steps, admission.At(std::min(largest, kComparedMultiplier)));
    for (const PlannedStep& step : steps) {
      const double part = share / static_cast<double>(steps.size());
      row.retention += part * step.plan.retention_rate;
      for (const InstancePlan& instance : step.plan.instances) row.replicas += instance.owner ? 0 : part;
    }
  }
  return row;
}

}  // namespace

absl::StatusOr<ThroughputFigure> MakeThroughputFigure(const FigureOptions& options,
                                                      const std::vector<FigureSeed>& seeds) {
  ThroughputFigure out;
  for (int m = 1; m <= 24; ++m) out.multipliers.push_back(m);
  for (const std::string& policy : options.policies) {
    LRMOE_ASSIGN_OR_RETURN(ThroughputRow row, MakeThroughputRow(options, seeds, policy, out.multipliers));
    out.rows.push_back(std::move(row));
  }
  return out;
}

absl::StatusOr<std::vector<MemoryRow>> MakeMemoryFigure(const FigureOptions& options,
                                                        const std::vector<FigureSeed>& seeds) {
  std::vector<MemoryRow> out;
  for (const std::string& policy : options.policies) {
    MemoryRow row;
    row.policy = policy;
    row.paper_gib =
        PaperFigure({{"lrmoe", 5.44}, {"ultraep", 8.03}, {"symi", 12.88}, {"fixed", 12.88}}, policy);
    row.paper_tokens_gib = PaperFigure({{"lrmoe", 4.97}, {"ultraep", 7.55}, {"fixed", 12.46}}, policy);
    LRMOE_ASSIGN_OR_RETURN(const std::vector<PlannedStep> steps, AllSteps(options, seeds, policy));
    const double scale = 1.0 / static_cast<double>(kGiB) / static_cast<double>(steps.size());
    for (const PlannedStep& step : steps) {
      const auto most = std::ranges::max_element(step.plan.ranks, {},
                                                 [](const RankPlan& r) { return r.memory_bytes.total(); });
      row.experts_gib += static_cast<double>(most->memory_bytes.experts) * scale;
      row.replicas_gib += static_cast<double>(most->memory_bytes.replicas) * scale;
      row.tokens_gib += static_cast<double>(most->memory_bytes.tokens + most->memory_bytes.staging) * scale;
    }
    out.push_back(std::move(row));
  }
  return out;
}

LatencyRow BackwardTime(const PlannedStep& step) {
  struct Rank {
    double rows = 0, in = 0, out = 0, state_in = 0, state_out = 0;  // rows
    double gradients_in = 0, gradients_out = 0;                     // experts
  };
  const planner::PlanningProblem& problem = step.problem;
  const auto num_ranks = static_cast<int32_t>(problem.cluster.ranks.size());
  std::vector<Rank> ranks(num_ranks);
  std::vector<double> routed(problem.counts.num_experts(), 0);
  for (const InstancePlan& instance : step.plan.instances)
    routed[instance.expert_idx] += static_cast<double>(instance.forward_rows);
  for (const InstancePlan& instance : step.plan.instances) {
    const int32_t g = instance.rank_idx, owner = problem.owner[instance.expert_idx];
    const auto forward = static_cast<double>(instance.forward_rows);
    const auto kept = static_cast<double>(instance.backward_rows);
    ranks[g].rows += kept;
    for (int32_t s = 0; s < num_ranks && forward > 0; ++s) {
      if (s == g) continue;
      const double rows = static_cast<double>(instance.forward_rows_by_source[s]) * kept / forward;
      ranks[g].in += rows;
      ranks[s].out += rows;
    }
    if (routed[instance.expert_idx] > 0) {
      const double expected =
          static_cast<double>(step.plan.quota[instance.expert_idx]) * forward / routed[instance.expert_idx];
      ranks[g].state_out += std::max(0.0, expected - kept);
      ranks[g].state_in += std::max(0.0, kept - expected);
    }
    if (g != owner && kept > 0 && step.plan.policy != "ideal")
      ++ranks[g].gradients_out, ++ranks[owner].gradients_in;
  }
  const MemoryModelOptions& model = problem.model;
  const MemoryCoefficients memory = ComputeMemoryCoefficients(model);
  const double parameters = 3.0 * model.hidden_size * model.intermediate_size;
  const double row_bytes = static_cast<double>(model.hidden_size * model.weight_bytes);
  const double bytes_per_ms = LinkGbPerS() * 1e6;
  LatencyRow slowest;
  for (const Rank& rank : ranks) {
    LatencyRow time;
    time.compute_ms = rank.rows * 2 * 2 * parameters / (ComputeTflops() * 1e9);
    const auto state = static_cast<double>(memory.staged_moved_row_bytes);
    time.dispatch_ms =
        std::max(rank.in * row_bytes + rank.state_in * state, rank.out * row_bytes + rank.state_out * state) /
        bytes_per_ms;
    time.combine_ms = std::max(rank.in, rank.out) * row_bytes / bytes_per_ms;
    time.gradients_ms = std::max(rank.gradients_in, rank.gradients_out) * parameters *
                        static_cast<double>(model.gradient_bytes) / bytes_per_ms;
    if (time.total() > slowest.total()) slowest = time;
  }
  return slowest;
}

absl::StatusOr<std::vector<LatencyRow>> MakeLatencyFigure(const FigureOptions& options,
                                                          const std::vector<FigureSeed>& seeds) {
  std::vector<LatencyRow> out;
  for (const std::string& policy : options.policies) {
    LatencyRow row;
    row.policy = policy;
    row.paper_ms =
        PaperFigure({{"lrmoe", 12.69}, {"ultraep", 16.41}, {"symi", 30.11}, {"fixed", 29.64}}, policy);
    LRMOE_ASSIGN_OR_RETURN(const std::vector<PlannedStep> steps, AllSteps(options, seeds, policy));
    const double part = 1.0 / static_cast<double>(steps.size());
    for (const PlannedStep& step : steps) {
      const LatencyRow time = BackwardTime(step);
      row.compute_ms += time.compute_ms * part;
      row.dispatch_ms += time.dispatch_ms * part;
      row.combine_ms += time.combine_ms * part;
      row.gradients_ms += time.gradients_ms * part;
    }
    out.push_back(std::move(row));
  }
  return out;
}

}  // namespace lrmoe::sim
