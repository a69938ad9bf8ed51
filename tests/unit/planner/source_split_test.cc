#include "controller/planner/source_split.h"

#include <catch2/catch.hpp>
#include <map>

#include "controller/planner/policies/policy_steps.h"
#include "controller/planner/quota.h"
#include "controller/planner/replica_search.h"
#include "tests/unit/planner/random_problem.h"

namespace lrmoe::planner {
namespace {

struct Split {
  PlanningProblem problem;
  Workload work;
  PlacedRows placed;
  SourceSplit split;
};

// A random placement with random rows, split by `rule`.
Split RandomSplit(Random& random, SplitRule rule) {
  Split out{RandomProblem(random, {}), {}, {}, {}};
  out.work = MakeWorkload(out.problem);
  RowsOnRanks rows(out.work.num_experts);
  for (int32_t e = 0; e < out.work.num_experts; ++e) {
    int64_t left = out.work.rows[e];
    for (int32_t g = 0; g < out.work.num_ranks; ++g) {
      if (g == out.problem.owner[e] || random.Below(2) == 0) continue;
      rows[e].emplace_back(g, random.Between(0, left));
      left -= rows[e].back().second;
    }
    rows[e].emplace_back(out.problem.owner[e], left);
  }
  out.placed = FromRows(out.problem, out.work, std::move(rows));
  out.split = SplitBySource(out.problem, out.work, out.placed, rule);
  return out;
}

void CheckSums(const Split& x) {
  std::vector<int64_t> left = x.work.by_source;
  for (int32_t i = 0; i < x.placed.size(); ++i) {
    int64_t sum = 0;
    for (int32_t s = 0; s < x.work.num_ranks; ++s) {
      REQUIRE(x.split.by_source[i][s] >= 0);
      sum += x.split.by_source[i][s];
      left[static_cast<size_t>(x.placed.expert[i]) * x.work.num_ranks + s] -= x.split.by_source[i][s];
    }
    REQUIRE(sum == x.placed.forward[i]);
  }
  for (int64_t rows : left) REQUIRE(rows == 0);
}

TEST_CASE("every rule splits all pairs and counts what crosses links", "[source_split]") {
  for (SplitRule rule : {SplitRule::kLocalFirst, SplitRule::kLocalThenProportional, SplitRule::kProportional,
                         SplitRule::kSourceOrder}) {
    Random random(9);
    for (int trial = 0; trial < 1000; ++trial) {
      const Split x = RandomSplit(random, rule);
      CheckSums(x);
      LinkRows slow;
      slow.sent_on_node = slow.sent_off_node = std::vector<int64_t>(x.work.num_ranks, 0);
      slow.received_on_node = slow.received_off_node = slow.sent_on_node;
      for (int32_t i = 0; i < x.placed.size(); ++i) {
        for (int32_t s = 0; s < x.work.num_ranks; ++s) {
          const int32_t rank = x.placed.rank[i];
          if (s == rank) continue;
          const auto& ranks = x.problem.cluster.ranks;
          const bool on_node = ranks[s].node == ranks[rank].node;
          (on_node ? slow.sent_on_node : slow.sent_off_node)[s] += x.split.by_source[i][s];
          (on_node ? slow.received_on_node : slow.received_off_node)[rank] += x.split.by_source[i][s];
        }
      }
      REQUIRE(slow.sent_on_node == x.split.links.sent_on_node);
      REQUIRE(slow.sent_off_node == x.split.links.sent_off_node);
      REQUIRE(slow.received_on_node == x.split.links.received_on_node);
      REQUIRE(slow.received_off_node == x.split.links.received_off_node);
    }
  }
}

TEST_CASE("local rules keep every pair local that can be", "[source_split]") {
  for (SplitRule rule : {SplitRule::kLocalFirst, SplitRule::kLocalThenProportional}) {
    Random random(10);
    for (int trial = 0; trial < 1000; ++trial) {
      const Split x = RandomSplit(random, rule);
      for (int32_t i = 0; i < x.placed.size(); ++i) {
        const int32_t rank = x.placed.rank[i];
        REQUIRE(x.split.by_source[i][rank] ==
                std::min(x.placed.forward[i], x.work.sources_of(x.placed.expert[i])[rank]));
      }
    }
  }
}

TEST_CASE("proportional shares are not below their whole part", "[source_split]") {
  Random random(11);
  for (int trial = 0; trial < 1000; ++trial) {
    const Split x = RandomSplit(random, SplitRule::kProportional);
    for (int32_t i = 0; i < x.placed.size(); ++i) {
      const int32_t e = x.placed.expert[i];
      for (int32_t s = 0; s < x.work.num_ranks && x.work.rows[e] > 0; ++s)
        REQUIRE(x.split.by_source[i][s] >= x.work.sources_of(e)[s] * x.placed.forward[i] / x.work.rows[e]);
    }
  }
}

TEST_CASE("source order deals pairs out one after the other", "[source_split]") {
  Random random(12);
  for (int trial = 0; trial < 1000; ++trial) {
    const Split x = RandomSplit(random, SplitRule::kSourceOrder);
    for (int32_t e = 0; e < x.work.num_experts; ++e) {
      std::vector<std::pair<int32_t, int32_t>> by_rank;
      for (int32_t i = x.placed.first[e]; i < x.placed.first[e + 1]; ++i)
        by_rank.emplace_back(x.placed.rank[i], i);
      std::sort(by_rank.begin(), by_rank.end());
      std::vector<int32_t> executor;  // of each pair of the expert, sources in ascending order
      for (const auto& [rank, i] : by_rank) executor.insert(executor.end(), x.placed.forward[i], i);
      size_t pair = 0;
      std::map<std::pair<int32_t, int32_t>, int64_t> slow;
      for (int32_t s = 0; s < x.work.num_ranks; ++s)
        for (int64_t n = 0; n < x.work.sources_of(e)[s]; ++n) ++slow[{executor[pair++], s}];
      for (const auto& [rank, i] : by_rank)
        for (int32_t s = 0; s < x.work.num_ranks; ++s) REQUIRE(x.split.by_source[i][s] == slow[{i, s}]);
    }
  }
}

TEST_CASE("waterfill gives one row at a time to the expert that has the fewest", "[quota]") {
  Random random(13);
  for (int trial = 0; trial < 1000; ++trial) {
    const PlanningProblem problem = RandomProblem(random, {});
    const Workload work = MakeWorkload(problem);
    const std::vector<int64_t> low = FloorRows(work, random.Below(2) ? 0.0 : random.Uniform());
    int64_t floor_total = 0;
    for (int64_t rows : low) floor_total += rows;
    const int64_t kept = random.Between(floor_total, work.total);
    std::vector<int64_t> slow = low;
    for (int64_t row = floor_total; row < kept; ++row) {
      int32_t fewest = -1;
      for (int32_t e = 0; e < work.num_experts; ++e)
        if (slow[e] < work.rows[e] && (fewest < 0 || slow[e] < slow[fewest])) fewest = e;
      ++slow[fewest];
    }
    REQUIRE(WaterfillQuotas(work, kept, low) == slow);
  }
}

}  // namespace
}  // namespace lrmoe::planner
