// MoonEP (MoonshotAI/MoonEP).
// Decides, from this invocation's counts, an exact balance: first between ranks, as in building an alias
// table (the rank with the largest surplus fills the largest deficit whole, so every rank receives from one
// owner at most), then which of the owner's experts serve each receiver, largest against largest. Assumes
// ranks of equal speed and as many slots as experts per rank. Differs: slots are the problem's; a receiver
// without a free one leaves the rest with the owner. Uneven sources are allowed: every rank's target is the
// mean, the first ranks take one row more where it is broken.
#include <algorithm>

#include "controller/planner/policies/policies.h"
#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {
namespace {

struct Delivery {
  int32_t rank;
  int64_t rows;
};

// What each owner has to deliver to other ranks, [G].
std::vector<std::vector<Delivery>> BalanceRanks(const Workload& work, const RowFlow& flow) {
  std::vector<int64_t> balance(work.num_ranks);
  for (int32_t g = 0; g < work.num_ranks; ++g)
    balance[g] = flow.load(g) - work.total / work.num_ranks - (g < work.total % work.num_ranks);
  std::vector<std::vector<Delivery>> out(work.num_ranks);
  for (;;) {
    const auto surplus = std::max_element(balance.begin(), balance.end());
    const auto deficit = std::min_element(balance.begin(), balance.end());
    if (*surplus <= 0 || *deficit >= 0) return out;
    out[surplus - balance.begin()].push_back({static_cast<int32_t>(deficit - balance.begin()), -*deficit});
    *surplus += *deficit;
    *deficit = 0;
  }
}

// Serves one owner's deliveries from its experts.
void Deliver(const PlanningProblem& problem, const std::vector<int32_t>& experts, std::vector<Delivery> due,
             RowFlow& flow) {
  std::sort(due.begin(), due.end(), [](const Delivery& a, const Delivery& b) { return a.rank < b.rank; });
  for (;;) {
    const auto largest = std::max_element(
        due.begin(), due.end(), [](const Delivery& a, const Delivery& b) { return a.rows < b.rows; });
    if (largest == due.end() || largest->rows == 0) return;
    int32_t expert = -1;
    for (int32_t e : experts)
      if (expert < 0 || flow.instance(e).rows > flow.instance(expert).rows) expert = e;
    const int64_t rows = expert < 0 ? 0 : std::min(largest->rows, flow.instance(expert).rows);
    if (rows == 0 || !CanHost(problem, flow, expert, largest->rank)) {
      largest->rows = 0;
      continue;
    }
    Export(flow, expert, largest->rank, rows);
    largest->rows -= rows;
  }
}

PlacedRows Place(const PlanningProblem& problem, const Workload& work) {
  RowFlow flow = AtOwners(problem, work);
  std::vector<std::vector<Delivery>> due = BalanceRanks(work, flow);
  std::vector<std::vector<int32_t>> owned(work.num_ranks);
  for (int32_t e = 0; e < work.num_experts; ++e) owned[problem.owner[e]].push_back(e);
  for (int32_t g = 0; g < work.num_ranks; ++g) Deliver(problem, owned[g], std::move(due[g]), flow);
  return FromFlow(work, flow);
}

}  // namespace

constinit const PolicyInfo kMoonepPolicy = {
    .name = "moonep",
    .source = "MoonEP (MoonshotAI/MoonEP)",
    .decides = "from exact counts: an exact balance in which every rank receives from one owner at most",
    .assumes =
        "ranks of equal speed; as many slots as experts per rank; tokens sent without regard to locality",
    .differs = "slots are the problem's: what finds none stays at the owner; uneven sources are allowed",
    .plan =
        [](const PlanningProblem& problem, const Workload& work) {
          return PlanPlacement(problem, work, SplitRule::kSourceOrder, [&] { return Place(problem, work); });
        },
};

}  // namespace lrmoe::planner
