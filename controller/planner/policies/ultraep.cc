// UltraEP, quota planner (Dots-Infra/UltraEP 1.0.0; arXiv 2606.04101).
// Decides, from this invocation's counts, which rows leave their overloaded owner for a replica. Nodes are
// its NVLink domains: each is solved by itself, no replica leaves one. A build at a threshold takes the
// overloaded ranks by load and their experts by rows; each export goes to the rank with the most slack. The
// threshold starts one tolerance above the mean; after three failures a search looks for the least one that
// builds. Assumes ranks of equal speed. Differs: the tolerance of the fast path is the policy's balance
// tolerance (0.01 there, and by default here).
#include <algorithm>
#include <cmath>

#include "controller/planner/policies/policies.h"
#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {
namespace {

constexpr int64_t kMinRowsPerReplica = 1024;  // MIN_TOKENS_PER_REPLICA; holds in the fallback only

struct ExportedRows {
  int32_t expert;
  int32_t rank;
  int64_t rows;
};

int64_t CeilDiv(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// One domain: the ranks of a node.
class Domain {
 public:
  Domain(const PlanningProblem& problem, const Workload& work, std::vector<int32_t> ranks,
         const std::vector<std::vector<int32_t>>& owned)
      : problem_(problem), work_(work), owned_(owned), ranks_(std::move(ranks)), load_(work.num_ranks, 0) {
    for (int32_t g : ranks_)
      for (int32_t e : owned_[g]) load_[g] += work.rows[e];
    order_ = ranks_;
    std::stable_sort(order_.begin(), order_.end(), [&](int32_t a, int32_t b) { return load_[a] > load_[b]; });
    slack_.resize(work.num_ranks);
    slots_.resize(work.num_ranks);
    holds_.assign(work.num_ranks, -1);
  }

  const std::vector<ExportedRows>& Plan() {
    int64_t total = 0;
    for (int32_t g : ranks_) total += load_[g];
    const int64_t low = CeilDiv(total, static_cast<int64_t>(ranks_.size()));
    const int64_t high = std::max(load_[order_[0]], low);
    const int64_t step = std::max<int64_t>(1, CeilDiv(high, 100));
    const int64_t first =
        static_cast<int64_t>(std::ceil(static_cast<double>(low) * (1 + problem_.policy.balance_tolerance)));
    for (int attempt = 0; attempt < 3; ++attempt)
      if (Build(std::min(high, first + attempt * step), true)) return exports_;
    if (!Build(low, false)) Search(low + 1, high);
    return exports_;
  }

 private:
  // Moves what exceeds `threshold` off every rank. In the fast path an export has to be a fair part of what
  // its rank still has to give away.
  bool Build(int64_t threshold, bool fast) {
    exports_.clear();
    int64_t excess = 0, slack = 0;
    for (int32_t g : ranks_) {
      excess += std::max<int64_t>(0, load_[g] - threshold);
      slack += slack_[g] = std::max<int64_t>(0, threshold - load_[g]);
      slots_[g] = problem_.cluster.ranks[g].replica_slots;
      holds_[g] = -1;
    }
    if (excess > slack) return false;
    for (int32_t g : order_) {
      int64_t need = load_[g] - threshold;
      if (need <= 0) break;
      for (int32_t e : owned_[g]) {
        if (need == 0) break;
        ExportExpert(e, fast, need);
      }
      if (need > 0) return false;
    }
    return true;
  }

  void ExportExpert(int32_t e, bool fast, int64_t& need) {
    int64_t available = work_.rows[e] - 1;  // the owner keeps one
    while (need > 0 && available > 0) {
      int32_t best = -1;
      int64_t targets = 0;
      for (int32_t g : ranks_) {
        if (slack_[g] == 0 || slots_[g] == 0 || holds_[g] == e) continue;
        ++targets;
        if (best < 0 || slack_[g] > slack_[best]) best = g;
      }
      if (best < 0) return;
      const int64_t rows = std::min({need, slack_[best], available});
      if (rows < (fast ? std::max<int64_t>(1, CeilDiv(need, targets)) : kMinRowsPerReplica)) return;
      exports_.push_back({e, best, rows});
      holds_[best] = e;  // an expert is exported in one go: the latest one is all there is to remember
      need -= rows;
      available -= rows;
      slack_[best] -= rows;
      --slots_[best];
    }
  }

  // Four probes a round; `high` always builds. What builds is not monotone in the threshold: a heuristic.
  void Search(int64_t low, int64_t high) {
    while (high - low > 4) {
      int64_t next_low = low, next_high = high;
      for (int64_t i = 1; i <= 4; ++i) {
        const int64_t probe = low + (high - low) / 5 * i + (high - low) % 5 * i / 5;
        if (Build(probe, false)) {
          next_high = probe;
          break;
        }
        next_low = probe + 1;
      }
      low = next_low;
      high = next_high;
    }
    while (low < high && !Build(low, false)) ++low;
    if (low >= high) Build(high, false);
  }

  const PlanningProblem& problem_;
  const Workload& work_;
  const std::vector<std::vector<int32_t>>& owned_;
  std::vector<int32_t> ranks_, order_;
  std::vector<int64_t> load_, slack_;  // [G]
  std::vector<int32_t> slots_;         // [G] free
  std::vector<int32_t> holds_;         // [G] the expert exported there last
  std::vector<ExportedRows> exports_;
};

PlacedRows Place(const PlanningProblem& problem, const Workload& work) {
  const auto owned = OwnedByRows(problem, work);
  RowFlow flow = AtOwners(problem, work);
  for (std::vector<int32_t>& ranks : RanksByNode(problem)) {
    Domain domain(problem, work, std::move(ranks), owned);
    for (const ExportedRows& x : domain.Plan()) Export(flow, x.expert, x.rank, x.rows);
  }
  return FromFlow(work, flow);
}

}  // namespace

constinit const PolicyInfo kUltraepPolicy = {
    .name = "ultraep",
    .source = "UltraEP 1.0.0, quota planner (arXiv 2606.04101)",
    .decides =
        "from exact counts: rows that leave overloaded owners, each to the rank of its node with the most "
        "slack; stops one balance tolerance above the node's mean",
    .assumes = "ranks of equal speed; a node is one NVLink domain that replicas never leave",
    .differs = "the tolerance is the policy's balance tolerance, which is its own by default",
    .plan =
        [](const PlanningProblem& problem, const Workload& work) {
          return PlanPlacement(problem, work, SplitRule::kLocalThenProportional,
                               [&] { return Place(problem, work); });
        },
};

}  // namespace lrmoe::planner
