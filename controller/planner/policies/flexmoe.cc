// FlexMoE (SIGMOD 2023; no public code, after the account of its steps in LAER-MoE's re-implementation).
// Decides changes to the present layout from past counts, while the balance ratio is above its trigger: up to
// ten rounds in which the expert with the most rows per copy gains a copy on every node and, where no slot is
// free, the one with the fewest loses one (or a third expert's copy moves to make way). A round that lowers
// neither the peak nor the ratio of the highest to the lowest load is undone and ends the search.
// Assumes that rows spread evenly over copies. Without history the layout stays as it is.
// Differs: the copy at an expert's owner neither shrinks nor moves; estimates are the sum of the history; the
// trigger is the balance tolerance. Copies are used in proportion, not by a schedule of its own.
#include <algorithm>
#include <limits>

#include "controller/planner/policies/policies.h"
#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {
namespace {

constexpr int kRounds = 10;

class FlexMoe {
 public:
  FlexMoe(const PlanningProblem& problem, const Workload& work)
      : problem_(problem), work_(work), copies_(HomeLayout(problem)), replicas_(work.num_ranks) {
    for (int32_t g = 0; g < static_cast<int32_t>(problem.resident.size()); ++g)
      for (int32_t e : problem.resident[g]) Expand(e, g);
  }

  PlacedRows Run() {
    rows_ = RecentCounts(problem_, problem_.history.size());
    if (!rows_.empty()) {
      const auto nodes = RanksByNode(problem_);
      for (int round = 0; round < kRounds && Improve(nodes); ++round) {
      }
    }
    return EvenOverCopies(problem_, work_, copies_);
  }

 private:
  struct Cost {
    double peak, ratio;
  };

  double Share(int32_t e) const {
    return static_cast<double>(rows_[e]) / static_cast<double>(copies_[e].size());
  }
  bool Holds(int32_t e, int32_t rank) const {
    return std::find(copies_[e].begin(), copies_[e].end(), rank) != copies_[e].end();
  }
  void Expand(int32_t e, int32_t rank) {
    copies_[e].push_back(rank);
    replicas_[rank].push_back(e);
  }
  void Shrink(int32_t e, int32_t rank) {
    copies_[e].erase(std::find(copies_[e].begin(), copies_[e].end(), rank));
    replicas_[rank].erase(std::find(replicas_[rank].begin(), replicas_[rank].end(), e));
  }
  void Migrate(int32_t e, int32_t from, int32_t to) {
    Shrink(e, from);
    Expand(e, to);
  }

  void UpdateLoads() {
    load_.assign(work_.num_ranks, 0);
    for (int32_t e = 0; e < work_.num_experts; ++e)
      for (int32_t g : copies_[e]) load_[g] += Share(e);
  }

  Cost CurrentCost() {
    UpdateLoads();
    const auto [low, high] = std::minmax_element(load_.begin(), load_.end());
    return {*high, *low > 0 ? *high / *low : std::numeric_limits<double>::infinity()};
  }

  bool Improve(const std::vector<std::vector<int32_t>>& nodes) {
    const Cost before = CurrentCost();
    double total = 0;
    for (double load : load_) total += load;
    if (before.peak * work_.num_ranks <= (1 + problem_.policy.balance_tolerance) * total) return false;
    int32_t hottest = 0;
    for (int32_t e = 1; e < work_.num_experts; ++e)
      if (Share(e) > Share(hottest)) hottest = e;
    const Copies copies = copies_;
    const std::vector<std::vector<int32_t>> replicas = replicas_;
    bool changed = false;
    for (const auto& ranks : nodes) changed = GainCopy(hottest, ranks) || changed;
    const Cost after = CurrentCost();
    if (changed && (after.peak < before.peak || after.ratio < before.ratio)) return true;
    copies_ = copies;
    replicas_ = replicas;
    return false;
  }

  // One copy more of the hottest expert on a node.
  bool GainCopy(int32_t hottest, const std::vector<int32_t>& ranks) {
    int32_t free = -1;
    for (int32_t g : ranks) {
      if (static_cast<int32_t>(replicas_[g].size()) >= problem_.cluster.ranks[g].replica_slots) continue;
      if (!Holds(hottest, g) && (free < 0 || load_[g] < load_[free])) free = g;
    }
    if (free < 0) free = MakeWay(hottest, ranks);
    if (free >= 0) Expand(hottest, free);
    return free >= 0;
  }

  // Takes the coldest replica off the node; returns the rank that can then hold the hottest expert, or -1.
  int32_t MakeWay(int32_t hottest, const std::vector<int32_t>& ranks) {
    int32_t coldest = -1, at = -1;
    for (int32_t g : ranks)
      for (int32_t e : replicas_[g])
        if (e != hottest && (coldest < 0 || Share(e) < Share(coldest))) coldest = e, at = g;
    if (coldest < 0) return -1;
    if (!Holds(hottest, at)) {
      Shrink(coldest, at);
      return at;
    }
    for (int32_t g : ranks) {  // a third expert moves there from a rank without the hottest
      if (Holds(hottest, g)) continue;
      for (int32_t third : replicas_[g]) {
        if (third == coldest || Holds(third, at)) continue;
        Shrink(coldest, at);
        Migrate(third, g, at);
        return g;
      }
    }
    return -1;
  }

  const PlanningProblem& problem_;
  const Workload& work_;
  std::vector<int64_t> rows_;                   // [E] estimate
  Copies copies_;                               // the owner's first
  std::vector<std::vector<int32_t>> replicas_;  // [G] experts beside the owned
  std::vector<double> load_;                    // [G] by the estimate
};

}  // namespace

constinit const PolicyInfo kFlexmoePolicy = {
    .name = "flexmoe",
    .source = "FlexMoE, after the steps of LAER-MoE's re-implementation",
    .decides =
        "from past counts: which copies to expand, shrink and migrate, starting from the present layout",
    .assumes = "rows spread evenly over copies; without history the layout stays",
    .differs =
        "the owner's copy stays; estimates are the sum of the history; acts above the balance tolerance",
    .plan =
        [](const PlanningProblem& problem, const Workload& work) {
          return PlanPlacement(problem, work, SplitRule::kProportional,
                               [&] { return FlexMoe(problem, work).Run(); });
        },
    .uses_history = true,
};

}  // namespace lrmoe::planner
