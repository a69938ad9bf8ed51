#include "controller/planner/candidate_loop.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "controller/planner/prediction.h"
#include "controller/planner/quota.h"
#include "controller/planner/source_split.h"

namespace lrmoe::planner {
namespace {

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

// A placement with what does not depend on the candidate's quotas.
struct Placed {
  PlacedRows rows;
  SourceSplit split;
};

struct Evaluated {
  Candidate candidate;
  std::vector<RankPlan> ranks;
  PredictedTime time;
  std::optional<RejectedCandidate> rejection;
};

bool SameRows(const PlacedRows& a, const PlacedRows& b) {
  return a.first == b.first && a.rank == b.rank && a.forward == b.forward;
}

class Loop {
 public:
  Loop(const PlanningProblem& problem, const Workload& work, const PolicyHooks& hooks)
      : problem_(problem), work_(work), hooks_(hooks), low_(FloorRows(work, problem.policy.retention_floor)) {
    for (const RankResources& rank : problem.cluster.ranks) memory_limited_ |= rank.memory_bytes != kNoLimit;
    for (int64_t rows : low_) low_total_ += rows;
    kept_.resize(hooks.num_variants);
  }

  absl::StatusOr<LayerPlan> Run() {
    std::vector<RejectedCandidate> rejected;
    for (double rate : problem_.policy.rates) {
      std::optional<RejectedCandidate> reason;
      missed_.assign(hooks_.num_variants, std::nullopt);
      for (int32_t variant = 0; variant < hooks_.num_variants; ++variant) {
        Placed& placed = Place(rate, variant);
        if (variant > 0 && SameRows(placed.rows, kept_[variant - 1]->rows)) continue;
        Evaluated evaluated = Evaluate(rate, placed);
        if (!evaluated.rejection)
          return Finish(rate, placed, std::move(evaluated), std::move(rejected), true);
        if (!reason) reason = evaluated.rejection;
        missed_[variant] = std::move(evaluated);
      }
      rejected.push_back(*std::move(reason));
    }
    if (problem_.policy.on_infeasible == OnInfeasible::kBestEffort) return BestEffort(std::move(rejected));
    const RejectedCandidate& last = rejected.back();
    return absl::ResourceExhaustedError(absl::StrFormat(
        "no candidate retention rate fits; at the lowest, %g, %s of %s needs %.0f %s, %.0f available",
        last.retention_rate, last.constraint, last.where, last.needed, last.unit, last.available));
  }

 private:
  // The placement that misses the constraints by the least factor at the lowest rate.
  LayerPlan BestEffort(std::vector<RejectedCandidate> rejected) {
    int32_t best = 0;
    double best_ratio = std::numeric_limits<double>::infinity();
    for (int32_t variant = 0; variant < hooks_.num_variants; ++variant) {
      if (!missed_[variant]) continue;  // the same as the one before
      const RejectedCandidate& reason = *missed_[variant]->rejection;
      const double ratio = reason.needed / std::max(reason.available, 1.0);
      if (ratio < best_ratio) best = variant, best_ratio = ratio;
    }
    return Finish(problem_.policy.rates.back(), *kept_[best], *std::move(missed_[best]), std::move(rejected),
                  false);
  }

  // Placements depend on the rate only through memory limits; where those do not bind, one serves all
  // candidates.
  Placed& Place(double rate, int32_t variant) {
    std::optional<Placed>& kept = kept_[variant];
    SearchLimits limits = Limits(rate);
    if (kept && !memory_limited_) return *kept;
    kept.emplace();
    kept->rows = hooks_.place(limits, variant);
    kept->split = SplitBySource(problem_, work_, kept->rows, hooks_.split_rule);
    return *kept;
  }

  // Rows that fit beside the rank's experts when all of a rank's rows run forward and `rate` of them
  // backward.
  SearchLimits Limits(double rate) const {
    SearchLimits limits;
    limits.capacity = work_.capacity;
    limits.target_level = work_.TargetLevel(work_.total, problem_.policy.balance_tolerance);
    if (!memory_limited_) return limits;
    const MemoryCoefficients& c = work_.memory;
    limits.replica_rows.resize(work_.num_ranks);
    for (int32_t g = 0; g < work_.num_ranks; ++g) {
      const int64_t available = problem_.cluster.ranks[g].memory_bytes;
      if (available == kNoLimit) continue;
      RankWork fixed;
      fixed.owned_experts = work_.num_owned[g];
      fixed.source_pairs = work_.source_pairs[g];
      limits.capacity.limit[g] = MaxForwardRows(c, fixed, rate, available);
      fixed.replicas = 1;
      limits.replica_rows[g] = limits.capacity.limit[g] - MaxForwardRows(c, fixed, rate, available);
    }
    return limits;
  }

  // What each rank can still hold of kept rows, beside its full forward rows.
  RankCapacity BackwardCapacity(const Placed& placed) const {
    RankCapacity out = work_.capacity;
    if (!memory_limited_) return out;
    std::vector<RankWork> ranks(work_.num_ranks);
    for (int32_t i = 0; i < placed.rows.size(); ++i)
      ranks[placed.rows.rank[i]].forward_rows += placed.rows.forward[i];
    for (int32_t g = 0; g < work_.num_ranks; ++g) {
      const int64_t available = problem_.cluster.ranks[g].memory_bytes;
      if (available == kNoLimit) continue;
      ranks[g].owned_experts = work_.num_owned[g];
      ranks[g].replicas = placed.rows.replicas[g];
      ranks[g].source_pairs = work_.source_pairs[g];
      out.limit[g] = MaxKeptRows(work_.memory, ranks[g], available);
    }
    return out;
  }

  Evaluated Evaluate(double rate, const Placed& placed) {
    Evaluated out;
    Candidate& candidate = out.candidate;
    candidate.placed = &placed.rows;
    candidate.split = &placed.split;
    candidate.kept = CeilRows(rate, work_.total);
    if (low_total_ > candidate.kept) {
      out.rejection = {rate,
                       "retention_floor",
                       "all experts",
                       static_cast<double>(low_total_),
                       static_cast<double>(candidate.kept),
                       "rows"};
    }
    SetQuotas(placed, candidate);
    out.ranks = PredictRanks(problem_, work_, candidate);
    out.time = PredictTime(problem_, work_, candidate);
    if (!out.rejection) out.rejection = CheckMemory(rate, out.ranks);
    const double needed_us = CommunicationUs(out.time);
    if (!out.rejection && !(needed_us <= problem_.policy.window_us))
      out.rejection = {rate, "window", "critical rank", needed_us, problem_.policy.window_us, "us"};
    return out;
  }

  // Quotas and backward rows. Where memory allows no quotas of this size, the uniform ones: the memory check
  // that follows then tells by how much they miss.
  void SetQuotas(const Placed& placed, Candidate& candidate) const {
    if (candidate.kept == work_.total) {
      candidate.quota = work_.rows;
      candidate.backward = placed.rows.forward;
      return;
    }
    candidate.quota = hooks_.quota_rule == QuotaRule::kWaterfill && low_total_ <= candidate.kept
                          ? WaterfillQuotas(work_, candidate.kept, low_)
                          : UniformQuotas(work_, candidate.kept);
    const RankCapacity capacity = BackwardCapacity(placed);
    std::optional<BackwardRows> uniform = AllocateBackward(work_, placed.rows, capacity, candidate.quota);
    bool above_floor = true;
    for (int32_t e = 0; e < work_.num_experts; ++e) above_floor &= candidate.quota[e] >= low_[e];
    const double target = work_.TargetLevel(candidate.kept, problem_.policy.balance_tolerance);
    const bool good =
        uniform && above_floor && (uniform->level <= target || hooks_.quota_rule != QuotaRule::kFair);
    if (!good && hooks_.quota_rule == QuotaRule::kFair && low_total_ <= candidate.kept) {
      const double level = CarryingLevel(placed, capacity, candidate.kept, target);
      std::optional<std::vector<int64_t>> quota;
      if (!std::isinf(level)) quota = FairQuotas(work_, placed.rows, capacity, level, candidate.kept, low_);
      auto fair = quota ? AllocateBackward(work_, placed.rows, capacity, *quota) : std::nullopt;
      if (fair) {
        candidate.quota = *std::move(quota);
        candidate.backward = std::move(fair->rows);
        return;
      }
    }
    if (!uniform) uniform = AllocateBackward(work_, placed.rows, work_.capacity, candidate.quota);
    candidate.backward = std::move(uniform->rows);
  }

  // The least level, at or above the balance target, at which the ranks can carry `kept` rows of what they
  // ran forward, and every expert its floor.
  double CarryingLevel(const Placed& placed, const RankCapacity& capacity, int64_t kept,
                       double target) const {
    std::vector<int64_t> forward(work_.num_ranks, 0);
    for (int32_t i = 0; i < placed.rows.size(); ++i) forward[placed.rows.rank[i]] += placed.rows.forward[i];
    RankCapacity carried = capacity;
    for (int32_t g = 0; g < work_.num_ranks; ++g) carried.limit[g] = std::min(carried.limit[g], forward[g]);
    double level = std::max(target, carried.LeastLevel(kept, work_.all_ranks));
    if (low_total_ > 0) {
      if (auto floor_rows = AllocateBackward(work_, placed.rows, capacity, low_))
        level = std::max(level, floor_rows->level);
    }
    return level;
  }

  std::optional<RejectedCandidate> CheckMemory(double rate, const std::vector<RankPlan>& ranks) const {
    int32_t worst = -1;
    double worst_ratio = 1;
    for (int32_t g = 0; g < work_.num_ranks; ++g) {
      const double needed = static_cast<double>(ranks[g].memory_bytes.total());
      const int64_t available = problem_.cluster.ranks[g].memory_bytes;
      if (ranks[g].memory_bytes.total() <= available) continue;
      const double ratio = needed / std::max(1.0, static_cast<double>(available));
      if (worst < 0 || ratio > worst_ratio) worst = g, worst_ratio = ratio;
    }
    if (worst < 0) return std::nullopt;
    return RejectedCandidate{rate,
                             "memory",
                             absl::StrCat("rank ", worst),
                             static_cast<double>(ranks[worst].memory_bytes.total()),
                             static_cast<double>(problem_.cluster.ranks[worst].memory_bytes),
                             "bytes"};
  }

  ImbalanceSummary Imbalance(const std::vector<RankPlan>& ranks, int64_t kept) const {
    ImbalanceSummary out;
    double forward = 0, backward = 0;
    for (int32_t g = 0; g < work_.num_ranks; ++g) {
      forward = std::max(forward, static_cast<double>(ranks[g].forward_rows) / work_.capacity.weight[g]);
      backward = std::max(backward, static_cast<double>(ranks[g].backward_rows) / work_.capacity.weight[g]);
    }
    const double mean = static_cast<double>(work_.total) / work_.total_weight;
    const double mean_kept = static_cast<double>(kept) / work_.total_weight;
    if (work_.total > 0) out.before = work_.owner_level / mean, out.forward = forward / mean;
    if (kept > 0) out.backward = backward / mean_kept;
    return out;
  }

  LayerPlan Finish(double rate, Placed& placed, Evaluated evaluated, std::vector<RejectedCandidate> rejected,
                   bool feasible) const {
    LayerPlan plan;
    plan.policy = problem_.policy.planner;
    plan.feasible = feasible;
    plan.retention_rate = rate;
    plan.imbalance = Imbalance(evaluated.ranks, evaluated.candidate.kept);
    plan.quota = std::move(evaluated.candidate.quota);
    plan.instances.resize(placed.rows.size());
    for (int32_t i = 0; i < placed.rows.size(); ++i) {
      InstancePlan& instance = plan.instances[i];
      instance.expert_idx = placed.rows.expert[i];
      instance.rank_idx = placed.rows.rank[i];
      instance.owner = problem_.owner[instance.expert_idx] == instance.rank_idx;
      instance.is_new = placed.rows.is_new[i];
      instance.forward_rows = placed.rows.forward[i];
      instance.backward_rows = evaluated.candidate.backward[i];
      instance.forward_rows_by_source = std::move(placed.split.by_source[i]);
    }
    plan.ranks = std::move(evaluated.ranks);
    plan.new_replicas = placed.rows.num_new;
    plan.predicted_us = evaluated.time;
    plan.rejected = std::move(rejected);
    return plan;
  }

  const PlanningProblem& problem_;
  const Workload& work_;
  const PolicyHooks& hooks_;
  const std::vector<int64_t> low_;
  int64_t low_total_ = 0;
  bool memory_limited_ = false;
  std::vector<std::optional<Placed>> kept_;       // by variant: of the last candidate
  std::vector<std::optional<Evaluated>> missed_;  // by variant: of the last candidate, where evaluated
};

}  // namespace

absl::StatusOr<LayerPlan> RunCandidates(const PlanningProblem& problem, const Workload& work,
                                        const PolicyHooks& hooks) {
  return Loop(problem, work, hooks).Run();
}

}  // namespace lrmoe::planner
