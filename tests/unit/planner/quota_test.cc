#include "controller/planner/quota.h"

#include <catch2/catch.hpp>
#include <numeric>

#include "controller/planner/replica_search.h"
#include "tests/unit/planner/random_problem.h"

namespace lrmoe::planner {
namespace {

// A dumb twin: the constraints of every subset of experts written out, rates raised by bisection.
class SlowFairness {
 public:
  SlowFairness(const Workload& work, const PlacedRows& placed, const std::vector<int64_t>& room,
               const std::vector<int64_t>& low, int64_t kept)
      : work_(work), low_(low), kept_(kept) {
    for (uint32_t set = 0; set < (1u << work.num_experts); ++set) {
      uint64_t ranks = 0;
      for (int32_t i = 0; i < placed.size(); ++i)
        if (set >> placed.expert[i] & 1) ranks |= uint64_t{1} << placed.rank[i];
      double carried = 0;
      for (int32_t g = 0; g < work.num_ranks; ++g)
        if (ranks >> g & 1) carried += static_cast<double>(room[g]);
      limit_.push_back(std::min(carried, static_cast<double>(kept)));
    }
  }

  // Real-valued fair amounts; false when `kept` cannot be carried.
  bool Solve(std::vector<double>& amount) {
    frozen_.assign(work_.num_experts, -1);
    while (std::ranges::any_of(frozen_, [](double x) { return x < 0; })) {
      if (!Holds(0)) return false;
      double low = 0, high = 1;
      if (!Holds(1)) {
        for (int i = 0; i < 200; ++i) (Holds((low + high) / 2) ? low : high) = (low + high) / 2;
        high = low;
      }
      const auto at = Amounts(high);
      // Freeze what is full or in a tight set.
      std::vector<bool> freeze(work_.num_experts, high == 1);
      for (uint32_t set = 1; set < limit_.size(); ++set) {
        if (Sum(set, at) < limit_[set] - 1e-6) continue;
        for (int32_t e = 0; e < work_.num_experts; ++e)
          if (set >> e & 1) freeze[e] = true;
      }
      for (int32_t e = 0; e < work_.num_experts; ++e)
        if (frozen_[e] < 0 && freeze[e]) frozen_[e] = at[e];
    }
    amount = frozen_;
    return std::accumulate(amount.begin(), amount.end(), 0.0) > static_cast<double>(kept_) - 1e-3;
  }

 private:
  std::vector<double> Amounts(double rate) const {
    std::vector<double> out(frozen_);
    for (int32_t e = 0; e < work_.num_experts; ++e)
      if (out[e] < 0)
        out[e] = std::max(static_cast<double>(low_[e]), rate * static_cast<double>(work_.rows[e]));
    return out;
  }
  double Sum(uint32_t set, const std::vector<double>& amount) const {
    double out = 0;
    for (int32_t e = 0; e < work_.num_experts; ++e)
      if (set >> e & 1) out += amount[e];
    return out;
  }
  bool Holds(double rate) const {
    const auto amount = Amounts(rate);
    for (uint32_t set = 1; set < limit_.size(); ++set)
      if (Sum(set, amount) > limit_[set] + 1e-7) return false;
    return true;
  }

  const Workload& work_;
  const std::vector<int64_t>& low_;
  int64_t kept_;
  std::vector<double> limit_;  // by set of experts
  std::vector<double> frozen_;
};

TEST_CASE("quotas are max-min fair over what the ranks can carry", "[quota]") {
  Random random(5);
  int carried = 0, bound = 0;
  for (int trial = 0; trial < 3000; ++trial) {
    CAPTURE(trial);
    const PlanningProblem problem = RandomProblem(random, {.max_experts = 7, .max_ranks = 5});
    const Workload work = MakeWorkload(problem);
    SearchLimits limits;
    limits.capacity = work.capacity;
    limits.target_level = work.TargetLevel(work.total, 0.01);
    const PlacedRows placed = FromFlow(work, SearchReplicas(problem, work, limits));
    std::vector<int64_t> room(work.num_ranks);
    RankCapacity capacity = work.capacity;
    for (int32_t g = 0; g < work.num_ranks; ++g)
      capacity.limit[g] = room[g] = random.Between(0, 2 * work.total / work.num_ranks);
    const std::vector<int64_t> low = FloorRows(work, random.Below(2) ? 0.0 : 0.3 * random.Uniform());
    const int64_t floor_total = std::accumulate(low.begin(), low.end(), int64_t{0});
    const int64_t kept = random.Between(std::max<int64_t>(floor_total, 0), work.total);
    std::vector<double> expected;
    const bool possible = SlowFairness(work, placed, room, low, kept).Solve(expected);
    const auto quota = FairQuotas(work, placed, capacity, 0x1p62, kept, low);
    REQUIRE(quota.has_value() == possible);
    if (!possible) continue;
    ++carried;
    REQUIRE(std::accumulate(quota->begin(), quota->end(), int64_t{0}) == kept);
    const double rate = static_cast<double>(kept) / std::max(1.0, static_cast<double>(work.total));
    for (int32_t e = 0; e < work.num_experts; ++e) {
      CAPTURE(e, (*quota)[e], expected[e]);
      CHECK(std::abs(static_cast<double>((*quota)[e]) - expected[e]) < 1.001);
      CHECK((*quota)[e] >= low[e]);
      CHECK((*quota)[e] <= work.rows[e]);
      bound += expected[e] < rate * static_cast<double>(work.rows[e]) - 1;
    }
    CHECK(AllocateBackward(work, placed, capacity, *quota).has_value());
  }
  CHECK(carried > 600);
  CHECK(bound > 200);
}

}  // namespace
}  // namespace lrmoe::planner
