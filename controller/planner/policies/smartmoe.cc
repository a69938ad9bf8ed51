// SmartMoE, online placement (thu-pacman/SmartMoE-AE; USENIX ATC 2023).
// Decides, from the mean of the last two invocations, which rank holds which expert: experts by rows, each to
// the lightest rank with room, its present one among equals. The result is used only if it lowers the peak.
// No copies: ranks hold as many experts as they own. Assumes ranks of equal speed. Without history nothing
// moves. Differs: plans every time, where the original does once per period. Residents that are no
// permutation of the experts count as the home layout.
#include <algorithm>

#include "controller/planner/policies/policies.h"
#include "controller/planner/policies/policy_steps.h"

namespace lrmoe::planner {
namespace {

// Rank that holds each expert now: its resident place, else its owner.
std::vector<int32_t> PresentLayout(const PlanningProblem& problem, const Workload& work) {
  std::vector<int32_t> present = problem.owner;
  for (int32_t g = 0; g < static_cast<int32_t>(problem.resident.size()); ++g)
    for (int32_t e : problem.resident[g])
      if (present[e] == problem.owner[e]) present[e] = g;
  std::vector<int32_t> held(work.num_ranks, 0);
  for (int32_t g : present) ++held[g];
  return held == work.num_owned ? present : problem.owner;
}

int64_t Peak(const Workload& work, const std::vector<int64_t>& rows, const std::vector<int32_t>& layout) {
  std::vector<int64_t> load(work.num_ranks, 0);
  for (size_t e = 0; e < layout.size(); ++e) load[layout[e]] += rows[e];
  return *std::max_element(load.begin(), load.end());
}

std::vector<int32_t> Greedy(const Workload& work, const std::vector<int64_t>& rows,
                            const std::vector<int32_t>& present) {
  std::vector<int32_t> layout(work.num_experts), room = work.num_owned;
  std::vector<int64_t> load(work.num_ranks, 0);
  for (int32_t e : ByRows(rows)) {
    int32_t best = -1;
    for (int32_t g = 0; g < work.num_ranks; ++g) {
      if (room[g] == 0) continue;
      if (best < 0 || load[g] < load[best] || (load[g] == load[best] && g == present[e])) best = g;
    }
    layout[e] = best;
    load[best] += rows[e];
    --room[best];
  }
  return layout;
}

PlacedRows Place(const PlanningProblem& problem, const Workload& work) {
  std::vector<int32_t> layout = PresentLayout(problem, work);
  const std::vector<int64_t> recent = RecentCounts(problem, 2);
  if (!recent.empty()) {
    std::vector<int32_t> next = Greedy(work, recent, layout);
    if (Peak(work, recent, next) < Peak(work, recent, layout)) layout = std::move(next);
  }
  Copies copies;
  for (int32_t rank : layout) copies.push_back({rank});
  return EvenOverCopies(problem, work, copies);
}

}  // namespace

constinit const PolicyInfo kSmartmoePolicy = {
    .name = "smartmoe",
    .source = "SmartMoE online placement (thu-pacman/SmartMoE-AE)",
    .decides = "from the last two invocations, which rank holds which expert; no copies",
    .assumes = "ranks of equal speed; without history nothing moves",
    .differs = "plans every time instead of once per period",
    .plan =
        [](const PlanningProblem& problem, const Workload& work) {
          return PlanPlacement(problem, work, SplitRule::kSourceOrder, [&] { return Place(problem, work); });
        },
    .uses_history = true,
    .moves_owners = true,
};

}  // namespace lrmoe::planner
