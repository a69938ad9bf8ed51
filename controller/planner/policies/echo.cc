// ECHO, elastic cloning of hot experts (NVIDIA/Megatron-LM pull request 2368).
// Decides, from this invocation's counts, clones that take what exceeds the mean. A rank's experts are
// stacked from the coldest up; what lies above the mean spills, so the hottest spill first. One slot per
// rank: spills are packed into spare room, largest first, by way of eight queues of similar size. More slots:
// spills and spares are laid on one line, largest first, and overlap; each rank keeps its largest overlaps.
// Assumes ranks of equal speed.
// Differs: slots may differ from rank to rank; the packing for one slot serves wherever no rank has more. A
// mean below seven rows, for which the queues of the original have no width, gives queues of width one.
#include <algorithm>
#include <array>
#include <deque>
#include <numeric>

#include "controller/planner/policies/policies.h"
#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {
namespace {

struct Amount {
  int32_t idx;  // expert or rank
  int64_t rows;
};

void SortDescending(std::vector<Amount>& amounts) {
  std::erase_if(amounts, [](const Amount& amount) { return amount.rows == 0; });
  std::stable_sort(amounts.begin(), amounts.end(),
                   [](const Amount& a, const Amount& b) { return a.rows > b.rows; });
}

// Rows of each expert above the mean of its rank.
std::vector<Amount> Spills(const PlanningProblem& problem, const Workload& work, int64_t mean) {
  std::vector<int64_t> stacked(work.num_ranks, 0), spill(work.num_experts, 0);
  std::vector<int32_t> order(work.num_experts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return work.rows[a] < work.rows[b]; });
  for (int32_t e : order) {
    int64_t& below = stacked[problem.owner[e]];
    spill[e] = std::min(work.rows[e], std::max<int64_t>(0, below + work.rows[e] - mean));
    below += work.rows[e];
  }
  std::vector<Amount> out;
  for (int32_t e = 0; e < work.num_experts; ++e) out.push_back({e, spill[e]});
  SortDescending(out);
  return out;
}

// Queue 0 holds spills of the mean and above, 1..7 ever smaller ones.
class SpillQueues {
 public:
  explicit SpillQueues(int64_t mean) : mean_(mean), width_(std::max<int64_t>(1, mean / 7)) {}
  void Push(Amount amount) {
    const int64_t below = amount.rows >= mean_ ? 0 : 7 - std::min<int64_t>(6, amount.rows / width_);
    queues_[below].push_back(amount);
  }
  bool Pop(Amount& amount) {
    for (auto& queue : queues_) {
      if (queue.empty()) continue;
      amount = queue.front();
      queue.pop_front();
      return true;
    }
    return false;
  }

 private:
  int64_t mean_, width_;
  std::array<std::deque<Amount>, 8> queues_;
};

void PackOneEach(const std::vector<Amount>& spills, const std::vector<Amount>& spares, int64_t mean,
                 RowFlow& flow) {
  SpillQueues queues(mean);
  for (const Amount& spill : spills) queues.Push(spill);
  for (const Amount& spare : spares) {
    Amount spill;
    if (!queues.Pop(spill)) return;
    const int64_t rows = std::min(spill.rows, spare.rows);
    Export(flow, spill.idx, spare.idx, rows);
    if (spill.rows > rows) queues.Push({spill.idx, spill.rows - rows});
  }
}

void OverlapLines(const PlanningProblem& problem, const std::vector<Amount>& spills,
                  const std::vector<Amount>& spares, RowFlow& flow) {
  size_t next = 0;
  int64_t left = spills.empty() ? 0 : spills[0].rows;
  for (const Amount& spare : spares) {
    std::vector<Amount> overlaps;
    for (int64_t room = spare.rows; room > 0 && next < spills.size();) {
      const int64_t rows = std::min(room, left);
      overlaps.push_back({spills[next].idx, rows});
      room -= rows;
      left -= rows;
      if (left == 0 && ++next < spills.size()) left = spills[next].rows;
    }
    SortDescending(overlaps);
    const size_t slots = static_cast<size_t>(problem.cluster.ranks[spare.idx].replica_slots);
    for (size_t i = 0; i < std::min(slots, overlaps.size()); ++i)
      Export(flow, overlaps[i].idx, spare.idx, overlaps[i].rows);
  }
}

PlacedRows Place(const PlanningProblem& problem, const Workload& work) {
  const int64_t mean = work.total / work.num_ranks;
  RowFlow flow = AtOwners(problem, work);
  int32_t most_slots = 0;
  std::vector<Amount> spares;
  for (int32_t g = 0; g < work.num_ranks; ++g) {
    const int32_t slots = problem.cluster.ranks[g].replica_slots;
    most_slots = std::max(most_slots, slots);
    if (slots > 0) spares.push_back({g, std::max<int64_t>(0, mean - flow.load(g))});
  }
  SortDescending(spares);
  const std::vector<Amount> spills = Spills(problem, work, mean);
  if (most_slots <= 1) {
    PackOneEach(spills, spares, mean, flow);
  } else {
    OverlapLines(problem, spills, spares, flow);
  }
  return FromFlow(work, flow);
}

}  // namespace

constinit const PolicyInfo kEchoPolicy = {
    .name = "echo",
    .source = "Megatron-LM ECHO, pull request 2368 (prototype of January 2026)",
    .decides =
        "from exact counts: clones of the hottest experts that take what exceeds the mean, packed into "
        "spare room",
    .assumes = "ranks of equal speed; sources share a clone in proportion",
    .differs = "slots may differ from rank to rank; tiny means do not break the packing",
    .plan =
        [](const PlanningProblem& problem, const Workload& work) {
          return PlanPlacement(problem, work, SplitRule::kProportional, [&] { return Place(problem, work); });
        },
};

}  // namespace lrmoe::planner
