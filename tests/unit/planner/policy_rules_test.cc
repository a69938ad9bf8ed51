// What the comparison policies promise one by one, beside what holds of all of them.
#include <catch2/catch.hpp>
#include <map>
#include <numeric>
#include <set>

#include "controller/planner/planner.h"
#include "controller/planner/policies/policy_steps.h"
#include "tests/unit/planner/legal_plan.h"
#include "tests/unit/planner/random_problem.h"
#include "tests/unit/planner/zipf_problem.h"

namespace lrmoe::planner {
namespace {

void Scale(PlanningProblem& problem, int64_t factor) {
  for (int32_t s = 0; s < problem.counts.num_sources(); ++s)
    for (int64_t& n : problem.counts.source(s)) n *= factor;
}

TEST_CASE("UltraEP keeps replicas in the node and a row at the owner", "[policy_rules]") {
  Random random(1);
  int32_t replicas = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    PlanningProblem problem = RandomProblem(random, {});
    const LayerPlan plan = PlanWith("ultraep", problem);
    for (const InstancePlan& instance : plan.instances) {
      const auto& ranks = problem.cluster.ranks;
      CHECK(ranks[instance.rank_idx].node == ranks[problem.owner[instance.expert_idx]].node);
      if (!instance.owner) CHECK(instance.forward_rows > 0);
      replicas += !instance.owner;
    }
    for (size_t i = 1; i < plan.instances.size(); ++i)
      if (!plan.instances[i].owner && plan.instances[i - 1].owner)
        CHECK(plan.instances[i - 1].forward_rows > 0);
  }
  CHECK(replicas > 500);
}

TEST_CASE("MoonEP with slots for all balances exactly, from one owner each", "[policy_rules]") {
  Random random(2);
  for (int trial = 0; trial < 2000; ++trial) {
    PlanningProblem problem = RandomProblem(random, {.residents = false});
    for (auto& rank : problem.cluster.ranks) rank.replica_slots = problem.counts.num_experts();
    const LayerPlan plan = PlanWith("moonep", problem);
    int64_t low = std::numeric_limits<int64_t>::max(), high = 0;
    for (const RankPlan& rank : plan.ranks) {
      low = std::min(low, rank.forward_rows);
      high = std::max(high, rank.forward_rows);
    }
    CHECK(high - low <= 1);
    std::map<int32_t, std::set<int32_t>> givers;
    for (const InstancePlan& instance : plan.instances)
      if (!instance.owner) givers[instance.rank_idx].insert(problem.owner[instance.expert_idx]);
    for (const auto& [rank, owners] : givers) CHECK(owners.size() == 1);
  }
}

// ECHO's overlap with several slots, row by row: every row of a spill and every place of a spare is written
// out.
std::map<std::pair<int32_t, int32_t>, int64_t> SlowOverlap(const PlanningProblem& problem,
                                                           const Workload& work) {
  const int64_t mean = work.total / work.num_ranks;
  std::vector<std::vector<int32_t>> rows_of_rank(work.num_ranks);
  std::vector<int64_t> spill(work.num_experts, 0);
  std::vector<int32_t> coldest_first(work.num_experts);
  std::iota(coldest_first.begin(), coldest_first.end(), 0);
  std::stable_sort(coldest_first.begin(), coldest_first.end(),
                   [&](int32_t a, int32_t b) { return work.rows[a] < work.rows[b]; });
  for (int32_t e : coldest_first)
    rows_of_rank[problem.owner[e]].insert(rows_of_rank[problem.owner[e]].end(), work.rows[e], e);
  for (const auto& rows : rows_of_rank)
    for (size_t i = mean; i < rows.size(); ++i) ++spill[rows[i]];
  std::vector<int64_t> spare(work.num_ranks, 0);
  for (int32_t g = 0; g < work.num_ranks; ++g)
    if (problem.cluster.ranks[g].replica_slots > 0)
      spare[g] = std::max<int64_t>(0, mean - static_cast<int64_t>(rows_of_rank[g].size()));
  std::vector<int32_t> spills, places;
  for (int32_t e : ByRows(spill)) spills.insert(spills.end(), spill[e], e);
  for (int32_t g : ByRows(spare)) places.insert(places.end(), spare[g], g);
  std::map<int32_t, std::map<int32_t, int64_t>> overlap;
  for (size_t i = 0; i < std::min(spills.size(), places.size()); ++i) ++overlap[places[i]][spills[i]];
  std::map<std::pair<int32_t, int32_t>, int64_t> out;
  for (const auto& [rank, experts] : overlap) {
    std::vector<std::pair<int64_t, int32_t>> sizes;  // equal ones: in the order of the line
    for (int32_t e : ByRows(spill))
      if (experts.contains(e)) sizes.emplace_back(-experts.at(e), e);
    std::stable_sort(sizes.begin(), sizes.end(),
                     [](const auto& a, const auto& b) { return a.first < b.first; });
    for (size_t i = 0; i < sizes.size(); ++i)
      if (static_cast<int32_t>(i) < problem.cluster.ranks[rank].replica_slots)
        out[{sizes[i].second, rank}] = -sizes[i].first;
  }
  return out;
}

TEST_CASE("ECHO's clones are the largest overlaps of spills and spares", "[policy_rules]") {
  Random random(3);
  int compared = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    CAPTURE(trial);
    PlanningProblem problem = RandomProblem(random, {.residents = false});
    int32_t most = 0;
    for (const auto& rank : problem.cluster.ranks) most = std::max(most, rank.replica_slots);
    if (most < 2) continue;
    const LayerPlan plan = PlanWith("echo", problem);
    std::map<std::pair<int32_t, int32_t>, int64_t> clones;
    for (const InstancePlan& instance : plan.instances)
      if (!instance.owner) clones[{instance.expert_idx, instance.rank_idx}] = instance.forward_rows;
    CHECK(clones == SlowOverlap(problem, MakeWorkload(problem)));
    compared += !clones.empty();
  }
  CHECK(compared > 300);
}

TEST_CASE("LLEP leaves what is balanced alone and moves no crumbs but last ones", "[policy_rules]") {
  Random random(4);
  int moved = 0;
  for (int trial = 0; trial < 2000; ++trial) {
    PlanningProblem problem = RandomProblem(random, {.uneven_rates = false});
    Scale(problem, 200);
    const LayerPlan plan = PlanWith("llep", problem);
    int32_t replicas = 0;
    std::map<int32_t, int> crumbs;
    for (const InstancePlan& instance : plan.instances) {
      replicas += !instance.owner;
      if (!instance.owner && instance.forward_rows < 1024) ++crumbs[instance.expert_idx];
    }
    if (plan.imbalance.before < 1.2999) CHECK(replicas == 0);
    for (const auto& [expert, count] : crumbs) CHECK(count == 1);
    moved += replicas > 0;
  }
  CHECK(moved > 500);
}

TEST_CASE("EPLB's hierarchical policy copies and packs as in its published example", "[policy_rules]") {
  const std::vector<std::vector<int64_t>> weights = {{90, 132, 40, 61, 104, 165, 39, 4, 73, 56, 183, 86},
                                                     {20, 107, 104, 64, 19, 197, 187, 157, 172, 86, 16, 27}};
  // Experts of both nodes, copies included; four groups of three experts.
  const std::vector<std::vector<std::multiset<int32_t>>> published = {
      {{5, 6, 5, 7, 8, 4, 3, 4}, {10, 9, 10, 2, 0, 1, 11, 1}},
      {{7, 10, 6, 8, 6, 11, 8, 9}, {2, 4, 5, 1, 5, 0, 3, 1}}};
  for (size_t layer = 0; layer < weights.size(); ++layer) {
    std::vector<int64_t> rows;
    for (int64_t weight : weights[layer]) rows.push_back(weight * 12);  // divisible among copies
    PlanningProblem problem = EvenProblem(12, 4, rows, 1);
    for (int32_t g = 0; g < 4; ++g) problem.cluster.ranks[g].node = g / 2;
    problem.history = {rows};
    const LayerPlan plan = PlanWith("eplb", problem);
    for (const InstancePlan& instance : plan.instances) {
      const auto& on_node = published[layer][instance.rank_idx / 2];
      const int64_t copies = static_cast<int64_t>(on_node.count(instance.expert_idx));
      CAPTURE(layer, instance.expert_idx, instance.rank_idx, copies);
      REQUIRE(copies > 0);
      const int64_t share = rows[instance.expert_idx] / copies;
      CHECK(instance.forward_rows % share == 0);  // several copies can meet on a rank
    }
    for (size_t node = 0; node < 2; ++node)
      for (int32_t e : published[layer][node]) {
        const auto held = [&](const InstancePlan& i) {
          return i.expert_idx == e && i.rank_idx / 2 == static_cast<int32_t>(node);
        };
        CHECK(std::any_of(plan.instances.begin(), plan.instances.end(), held));
      }
  }
}

TEST_CASE("SYMI lays copies side by side", "[policy_rules]") {
  Random random(6);
  for (int trial = 0; trial < 1000; ++trial) {
    PlanningProblem problem = RandomProblem(random, {.residents = false});
    const Workload work = MakeWorkload(problem);
    problem.history = {work.rows};
    const LayerPlan plan = PlanWith("symi", problem);
    std::vector<int32_t> first(work.num_experts, work.num_ranks), last(work.num_experts, -1);
    for (const InstancePlan& instance : plan.instances) {
      first[instance.expert_idx] = std::min(first[instance.expert_idx], instance.rank_idx);
      last[instance.expert_idx] = std::max(last[instance.expert_idx], instance.rank_idx);
    }
    for (int32_t e = 1; e < work.num_experts; ++e) CHECK(first[e] >= last[e - 1]);
  }
}

TEST_CASE("SmartMoE permutes experts and does not raise the peak of the past", "[policy_rules]") {
  Random random(7);
  int moved = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    PlanningProblem problem = RandomProblem(random, {.uneven_rates = false, .residents = false});
    const Workload work = MakeWorkload(problem);
    problem.history = {work.rows};
    const LayerPlan plan = PlanWith("smartmoe", problem);
    CHECK(plan.instances.size() == static_cast<size_t>(work.num_experts));
    std::vector<int32_t> held(work.num_ranks, 0);
    for (const InstancePlan& instance : plan.instances) ++held[instance.rank_idx];
    CHECK(held == work.num_owned);
    CHECK(plan.imbalance.forward <= plan.imbalance.before);
    moved += plan.new_replicas > 0;
    CHECK((plan.new_replicas > 0) == (plan.imbalance.forward < plan.imbalance.before));
  }
  CHECK(moved > 300);
}

TEST_CASE("FasterMoE shadows a prefix of the hottest experts; sources run their own rows", "[policy_rules]") {
  Random random(8);
  int shadowed = 0;
  for (int trial = 0; trial < 1000; ++trial) {
    PlanningProblem problem = RandomProblem(random, {});
    Scale(problem, 30);
    const LayerPlan plan = PlanWith("fastermoe", problem);
    const Workload work = MakeWorkload(problem);
    std::vector<int32_t> instances(work.num_experts, 0);
    for (const InstancePlan& instance : plan.instances) ++instances[instance.expert_idx];
    bool prefix = true;
    for (int32_t e : ByRows(work.rows)) {
      if (work.num_ranks == 1) break;
      CHECK((instances[e] == 1 || instances[e] == work.num_ranks));
      prefix = prefix && instances[e] > 1;
      CHECK((instances[e] > 1) == prefix);
      shadowed += prefix;
    }
    for (const InstancePlan& instance : plan.instances)
      if (instances[instance.expert_idx] > 1)
        CHECK(instance.forward_rows == problem.counts.at(instance.rank_idx, instance.expert_idx));
  }
  CHECK(shadowed > 100);
}

TEST_CASE("TopoEP copies into a node only what saves more than it costs", "[policy_rules]") {
  // Nodes {0, 1} and {2, 3}; experts 0 and 1 live on rank 0. An expert is 24 rows of hidden elements.
  PlanningProblem problem = EvenProblem(4, 4, {0, 0, 0, 0}, 1);
  problem.model.hidden_size = 16;
  problem.model.intermediate_size = 8;
  problem.owner = {0, 0, 2, 3};
  for (int32_t g = 0; g < 4; ++g) problem.cluster.ranks[g].node = g / 2;
  problem.policy.balance_tolerance = 10;  // the second level has nothing to do
  problem.counts.at(2, 0) = 12;           // there and back 24 rows: no gain
  problem.counts.at(3, 1) = 13;
  const LayerPlan plan = PlanWith("topoep", problem);
  REQUIRE(plan.instances.size() == 5);
  CHECK(plan.instances[2].expert_idx == 1);
  CHECK(plan.instances[2].rank_idx == 2);
  CHECK(plan.instances[2].forward_rows == 13);
  CHECK(plan.ranks[0].forward_rows == 12);
}

TEST_CASE("FlexMoE expands from where it is, shrinks what is cold, and stops when balanced",
          "[policy_rules]") {
  PlanningProblem problem = EvenProblem(4, 4, {700, 100, 100, 100}, 1);
  problem.history = {{700, 100, 100, 100}};
  LayerPlan plan = PlanWith("flexmoe", problem);
  CHECK(plan.new_replicas > 0);
  CHECK(plan.imbalance.forward < plan.imbalance.before);
  problem.resident = {{3}, {2}, {1}, {1}};  // every slot taken by cold experts
  plan = PlanWith("flexmoe", problem);
  CHECK(plan.new_replicas > 0);
  CHECK(plan.imbalance.forward < plan.imbalance.before);
  problem.resident.clear();
  problem.history = {{250, 250, 250, 250}};
  CHECK(PlanWith("flexmoe", problem).new_replicas == 0);
}

}  // namespace
}  // namespace lrmoe::planner
