// The pure parts of the engine: routing and backward routing.
#include <algorithm>
#include <catch2/catch.hpp>
#include <numeric>

#include "common/cluster.h"
#include "common/random.h"
#include "tests/support/engine/engine_runs.h"
#include "worker/engine/route_backward.h"
#include "worker/engine/routing.h"

using namespace lrmoe;
using namespace lrmoe::engine;
using lrmoe::testing::PlacedPairs;
using lrmoe::testing::PlacePairs;
using lrmoe::testing::ScriptedPlans;

namespace {

struct Case {
  int32_t num_ranks, num_experts, top_k;
  std::vector<std::vector<int32_t>> expert_idx;  // [G][T*k]
  RoutedCounts counts;
  ExecutionPlan execution;
};

Case RandomCase(uint64_t seed) {
  Random random(seed);
  Case c;
  c.num_ranks = static_cast<int32_t>(random.Between(1, 5));
  c.num_experts = static_cast<int32_t>(random.Between(1, 9));
  c.top_k = static_cast<int32_t>(random.Between(1, std::min(4, c.num_experts)));
  c.counts = RoutedCounts(c.num_ranks, c.num_experts);
  for (int32_t s = 0; s < c.num_ranks; ++s) {
    c.expert_idx.emplace_back();
    for (int64_t t = random.Between(0, 12); t > 0; --t) {
      std::vector<int32_t> experts(c.num_experts);
      std::iota(experts.begin(), experts.end(), 0);
      for (int32_t j = 0; j < c.top_k; ++j) {
        std::swap(experts[j], experts[random.Between(j, c.num_experts - 1)]);
        c.expert_idx[s].push_back(experts[j]);
        ++c.counts.at(s, experts[j]);
      }
    }
  }
  ScriptedPlans scripted;
  scripted.seed = seed;
  scripted.replica_probability = random.Uniform();
  scripted.retention = random.Uniform();
  scripted.random_quotas = true;
  c.execution = scripted({1, 0, 0}, c.counts);
  return c;
}

struct Routed {
  std::vector<int32_t> instance, position;
  ForwardRoute route;
};

std::vector<Routed> RouteAll(const Case& c) {
  std::vector<Routed> out(c.num_ranks);
  for (int32_t s = 0; s < c.num_ranks; ++s) {
    PlacedPairs placed = PlacePairs(c.execution.plan, c.expert_idx[s], s);
    out[s] = {std::move(placed.instance), std::move(placed.position), RouteForward(c.execution.plan, s)};
  }
  return out;
}

// Receive order at each rank, spelled out: (source, pair) lists sorted by what the header says.
struct Arrival {
  int32_t source, instance;
  size_t pair;
};

}  // namespace

TEST_CASE("forward routing follows the plan and all ranks agree on every position") {
  for (uint64_t seed = 0; seed < 300; ++seed) {
    const Case c = RandomCase(seed);
    const LayerPlan& plan = c.execution.plan;
    const std::vector<int32_t> owner = ContiguousOwners(c.num_experts, c.num_ranks);
    for (int32_t s = 0; s < c.num_ranks; ++s)
      REQUIRE(CheckExecutable(plan, owner, s, c.counts.source(s)).ok());
    const std::vector<Routed> routed = RouteAll(c);
    for (int32_t s = 0; s < c.num_ranks; ++s) {
      std::vector<int32_t> by_expert(c.expert_idx[s].size());
      std::iota(by_expert.begin(), by_expert.end(), 0);
      std::stable_sort(by_expert.begin(), by_expert.end(),
                       [&](int32_t a, int32_t b) { return c.expert_idx[s][a] < c.expert_idx[s][b]; });
      const std::vector<kernels::Stretch> order = SendOrder(plan, routed[s].route, s);
      const std::vector<int64_t>& first = routed[s].route.first_position;
      size_t listed = 0;
      for (size_t i = 0; i < plan.instances.size(); ++i) {
        REQUIRE(order[i].to == first[i]);
        for (int64_t j = 0; j < order[i].count; ++j, ++listed) {
          const int32_t pair = by_expert[order[i].from + j];
          REQUIRE(routed[s].instance[pair] == static_cast<int32_t>(i));
          REQUIRE(routed[s].position[pair] == order[i].to + j);
        }
      }
      REQUIRE(listed == by_expert.size());
    }
    for (int32_t d = 0; d < c.num_ranks; ++d) {
      std::vector<Arrival> arrivals;
      for (int32_t s = 0; s < c.num_ranks; ++s)
        for (size_t p = 0; p < c.expert_idx[s].size(); ++p)
          if (plan.instances[routed[s].instance[p]].rank_idx == d)
            arrivals.push_back({s, routed[s].instance[p], p});
      std::sort(arrivals.begin(), arrivals.end(), [](const Arrival& a, const Arrival& b) {
        return std::tie(a.source, a.instance, a.pair) < std::tie(b.source, b.instance, b.pair);
      });
      const ForwardRoute& route = routed[d].route;
      REQUIRE(route.rows == static_cast<int64_t>(arrivals.size()));
      // Send positions, offset by the source's part, are receive positions.
      std::vector<int64_t> before(c.num_ranks, 0);
      size_t at = 0;
      for (int32_t s = 0; s < c.num_ranks; ++s) {
        int64_t base = 0;
        for (int32_t r = 0; r < d; ++r) base += routed[s].route.send_rows[r];
        REQUIRE(routed[s].route.send_rows[d] == route.recv_rows[s]);
        for (int64_t i = 0; i < route.recv_rows[s]; ++i, ++at)
          REQUIRE(routed[s].position[arrivals[at].pair] == base + i);
      }
      // Runs tile rows and positions, and lead to rows of their instance and source.
      int64_t row = 0;
      for (const RowRun& run : route.runs) {
        REQUIRE(run.row == row);
        row += run.count;
        for (int64_t i = 0; i < run.count; ++i) {
          REQUIRE(arrivals[run.position + i].source == run.source_idx);
          REQUIRE(arrivals[run.position + i].instance == route.local[run.local_idx].instance_idx);
        }
      }
      REQUIRE(row == route.rows);
    }
  }
}

TEST_CASE("backward routing runs every kept pair once, at its own expert, within the allocation") {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    const Case c = RandomCase(seed);
    const LayerPlan& plan = c.execution.plan;
    Random random(seed + 1);
    const std::vector<Routed> routed = RouteAll(c);
    // Keep quota[e] random pairs of each expert.
    std::vector<std::vector<uint8_t>> kept(c.num_ranks);
    std::vector<std::vector<std::pair<int32_t, size_t>>> pairs(c.num_experts);
    for (int32_t s = 0; s < c.num_ranks; ++s) {
      kept[s].assign(c.expert_idx[s].size(), 0);
      for (size_t p = 0; p < kept[s].size(); ++p) pairs[c.expert_idx[s][p]].push_back({s, p});
    }
    for (int32_t e = 0; e < c.num_experts; ++e)
      for (int64_t i = 0; i < plan.quota[e]; ++i) {
        std::swap(pairs[e][i], pairs[e][random.Between(i, static_cast<int64_t>(pairs[e].size()) - 1)]);
        kept[pairs[e][i].first][pairs[e][i].second] = 1;
      }
    KeptCounts counts(plan.instances.size(), c.num_ranks);
    for (int32_t s = 0; s < c.num_ranks; ++s)
      for (size_t p = 0; p < kept[s].size(); ++p) counts.at(routed[s].instance[p], s) += kept[s][p];
    std::vector<int32_t> node(c.num_ranks);
    for (int32_t r = 0; r < c.num_ranks; ++r) node[r] = r / 2;
    const std::vector<Move> moves = PlanMoves(plan, counts, node);

    std::vector<int64_t> executed(plan.instances.size(), 0);
    std::vector<SourceSegments> from(c.num_ranks);
    for (int32_t s = 0; s < c.num_ranks; ++s) {
      from[s] = SegmentsFrom(plan, counts, moves, s);
      std::vector<std::vector<size_t>> forwarded(plan.instances.size());  // kept pairs, by instance
      size_t num_kept = 0;
      for (size_t p = 0; p < kept[s].size(); ++p) {
        if (kept[s][p] == 0) continue;
        forwarded[routed[s].instance[p]].push_back(p);
        ++num_kept;
      }
      std::vector<bool> ran(kept[s].size(), false), placed(num_kept, false);
      size_t num_ran = 0;
      for (const Segment& segment : from[s].segments) {
        const std::vector<size_t>& here = forwarded[segment.from_instance];
        REQUIRE(segment.source_idx == s);
        REQUIRE(segment.first_kept + segment.count <= static_cast<int64_t>(here.size()));
        REQUIRE(segment.position + segment.count <= static_cast<int64_t>(num_kept));
        for (int64_t i = 0; i < segment.count; ++i) {
          const size_t p = here[segment.first_kept + i];
          REQUIRE(plan.instances[segment.to_instance].expert_idx == c.expert_idx[s][p]);
          REQUIRE(!ran[p]);
          REQUIRE(!placed[segment.position + i]);
          ran[p] = placed[segment.position + i] = true;
          ++executed[segment.to_instance];
          ++num_ran;
        }
      }
      REQUIRE(num_ran == num_kept);
    }
    int64_t overflow = 0, moved = 0;
    for (size_t i = 0; i < plan.instances.size(); ++i) {
      REQUIRE(executed[i] == plan.instances[i].backward_rows);
      int64_t here = 0;
      for (int32_t s = 0; s < c.num_ranks; ++s) here += counts.at(i, s);
      overflow += std::max<int64_t>(0, here - plan.instances[i].backward_rows);
    }
    for (const Move& move : moves) moved += move.count;
    REQUIRE(moved == overflow);  // only the overflow moves
    for (int32_t d = 0; d < c.num_ranks; ++d) {
      const ExecutorSegments at = SegmentsAt(plan, counts, moves, d);
      int64_t row = 0;
      for (const Segment& segment : at.segments) {
        REQUIRE(segment.row == row);
        row += segment.count;
        // The source has the same stretch at the same place.
        const SourceSegments& source = from[segment.source_idx];
        const bool found =
            std::any_of(source.segments.begin(), source.segments.end(), [&](const Segment& other) {
              int64_t send_base = 0, recv_base = 0;
              for (int32_t r = 0; r < d; ++r) send_base += source.send_rows[r];
              for (int32_t s = 0; s < segment.source_idx; ++s) recv_base += at.recv_rows[s];
              return other.to_instance == segment.to_instance &&
                     other.from_instance == segment.from_instance && other.first_kept == segment.first_kept &&
                     other.count == segment.count &&
                     other.position - send_base == segment.position - recv_base;
            });
        REQUIRE(found);
      }
      REQUIRE(row == at.rows);
    }
  }
}

TEST_CASE("moves prefer the node, then the lowest rank, and take the last pairs") {
  LayerPlan plan;
  plan.ranks.resize(4);
  plan.quota = {6};
  for (int32_t r : {1, 0, 2, 3})
    plan.instances.push_back({0, r, r == 1, false, 0, 2, std::vector<int64_t>(4, 0)});
  plan.instances[0].backward_rows = 3;
  plan.instances[1].backward_rows = 1;
  plan.instances[2].backward_rows = 1;
  plan.instances[3].backward_rows = 1;
  KeptCounts kept(4, 4);
  kept.at(2, 0) = 2;  // rank 2 forwarded all six: two of source 0, four of source 3
  kept.at(2, 3) = 4;
  const std::vector<Move> moves = PlanMoves(plan, kept, std::vector<int32_t>{0, 0, 1, 1});
  // One stays. Rank 3 shares the node, then ranks 0 and 1.
  const std::vector<Move> expected = {{2, 3, 0, 1, 1}, {2, 1, 3, 0, 1}, {2, 0, 3, 1, 3}};
  REQUIRE(moves == expected);
}

TEST_CASE("a plan that cannot be executed is refused with the reason") {
  Case c = RandomCase(3);
  const std::vector<int32_t> owner = ContiguousOwners(c.num_experts, c.num_ranks);
  const auto message = [&](const LayerPlan& plan) {
    return std::string(CheckExecutable(plan, owner, 0, c.counts.source(0)).message());
  };
  REQUIRE(message(c.execution.plan).empty());
  LayerPlan plan = c.execution.plan;
  plan.quota.push_back(1);
  REQUIRE_THAT(message(plan), Catch::Contains("quota has"));
  plan = c.execution.plan;
  ++plan.instances[0].forward_rows;
  REQUIRE_THAT(message(plan), Catch::Contains("its sources sum to"));
  plan = c.execution.plan;
  ++plan.instances[0].forward_rows;
  ++plan.instances[0].forward_rows_by_source[0];
  REQUIRE_THAT(message(plan), Catch::Contains("the plan counts"));
  plan = c.execution.plan;
  ++plan.instances[0].backward_rows;
  REQUIRE_THAT(message(plan), Catch::Contains("backward rows of expert"));
  plan = c.execution.plan;
  plan.instances.insert(plan.instances.begin(), plan.instances[0]);
  REQUIRE_THAT(message(plan), Catch::Contains("not ordered"));
}
