// LLEP, least-loaded expert parallelism (SalesforceAIResearch/LeastLoadedEP; arXiv 2601.17111).
// Decides, from this invocation's counts, whether to act at all (only where owners are 1.3 times the mean or
// more), then takes experts by rows: what fits under the mean stays at the owner, the rest goes in pieces of
// 1024 rows or more to the ranks with the least load that have room.
// Assumes ranks of equal speed; replicas live for one forward and are not limited in number.
// Differs: replica_slots limits them; where no rank with room has a slot, the rest goes to the least loaded
// rank that has one, else it stays at the owner. The capacity factor is the paper's 1.0.
#include <algorithm>

#include "controller/planner/policies/policies.h"
#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {
namespace {

constexpr double kActAbove = 1.3;         // lambda
constexpr int64_t kMinRowsOfGemm = 1024;  // m

class LeastLoaded {
 public:
  LeastLoaded(const PlanningProblem& problem, const Workload& work)
      : problem_(problem), work_(work), flow_(AtOwners(problem, work)), effective_(work.num_ranks) {
    for (int32_t g = 0; g < work.num_ranks; ++g) effective_[g] = flow_.load(g);
  }

  PlacedRows Run() {
    const int64_t mean = work_.total / work_.num_ranks;
    const int64_t highest = *std::max_element(effective_.begin(), effective_.end());
    if (static_cast<double>(highest) * work_.num_ranks < kActAbove * static_cast<double>(work_.total))
      return FromFlow(work_, flow_);
    for (int32_t e : ByRows(work_.rows)) {
      const int32_t home = problem_.owner[e];
      effective_[home] -= work_.rows[e];  // no longer pending
      const int64_t stays = std::clamp<int64_t>(mean - effective_[home], 0, work_.rows[e]);
      effective_[home] += stays;
      if (stays > 0) {
        SpillRepeatedly(e, work_.rows[e] - stays, mean);
      } else {
        SpillInOnePass(e, work_.rows[e], mean);
      }
    }
    return FromFlow(work_, flow_);
  }

 private:
  bool MayTake(int32_t e, int32_t rank) const {
    return rank != problem_.owner[e] && CanHost(problem_, flow_, e, rank);
  }

  void Take(int32_t e, int32_t rank, int64_t rows) {
    effective_[rank] += rows;
    Export(flow_, e, rank, rows);
  }

  // The least loaded other rank that may take the expert, or its owner.
  int32_t LeastLoadedRank(int32_t e) const {
    int32_t best = -1;
    for (int32_t g = 0; g < work_.num_ranks; ++g)
      if (MayTake(e, g) && (best < 0 || effective_[g] < effective_[best])) best = g;
    return best < 0 ? problem_.owner[e] : best;
  }

  void SpillRepeatedly(int32_t e, int64_t rest, int64_t capacity) {
    std::vector<uint8_t> skipped(work_.num_ranks, 0);
    while (rest > 0) {
      int32_t best = -1;
      for (int32_t g = 0; g < work_.num_ranks; ++g) {
        if (skipped[g] || effective_[g] >= capacity || !MayTake(e, g)) continue;
        if (best < 0 || effective_[g] < effective_[best]) best = g;
      }
      if (best < 0) return Take(e, LeastLoadedRank(e), rest);
      const int64_t rows = std::min(rest, capacity - effective_[best]);
      if (rows < kMinRowsOfGemm && rows < rest) {
        skipped[best] = 1;
        continue;
      }
      Take(e, best, rows);
      rest -= rows;
    }
  }

  void SpillInOnePass(int32_t e, int64_t rest, int64_t capacity) {
    std::vector<int32_t> order = work_.all_ranks;
    std::stable_sort(order.begin(), order.end(),
                     [&](int32_t a, int32_t b) { return effective_[a] < effective_[b]; });
    for (int32_t g : order) {
      if (rest == 0) return;
      if (!MayTake(e, g)) continue;
      const int64_t rows = std::min(rest, capacity - effective_[g]);
      if (rows <= 0 || (rows < kMinRowsOfGemm && rows < rest)) continue;
      Take(e, g, rows);
      rest -= rows;
    }
    if (rest > 0) Take(e, LeastLoadedRank(e), rest);
  }

  const PlanningProblem& problem_;
  const Workload& work_;
  RowFlow flow_;
  std::vector<int64_t> effective_;  // [G] rows assigned, and pending at their owner
};

}  // namespace

constinit const PolicyInfo kLlepPolicy = {
    .name = "llep",
    .source = "Least-loaded expert parallelism (arXiv 2601.17111; SalesforceAIResearch/LeastLoadedEP)",
    .decides =
        "from exact counts: where owners reach 1.3 times the mean, rows above it go to the least loaded "
        "ranks, at least 1024 at a time",
    .assumes = "ranks of equal speed; weights are sent for one forward, to any number of ranks",
    .differs = "replica_slots limits replicas; what finds no slot stays at the owner",
    .plan =
        [](const PlanningProblem& problem, const Workload& work) {
          return PlanPlacement(problem, work, SplitRule::kSourceOrder,
                               [&] { return LeastLoaded(problem, work).Run(); });
        },
};

}  // namespace lrmoe::planner
