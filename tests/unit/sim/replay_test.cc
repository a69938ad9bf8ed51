#include "tools/sim/replay.h"
#include "common/regroup.h"

#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <map>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/random.h"
#include "common/regroup.h"
#include "common/synthetic_routing.h"
#include "controller/planner/planner.h"
#include "tests/unit/sim/temporary_file.h"
#include "tools/sim/progress.h"
#include "tools/sim/trace_source.h"

namespace lrmoe::sim {
namespace {

TraceRecord Record(const char* workload, int64_t step, int32_t layer) {
  SyntheticOptions options;
  options.workload = *ParseSyntheticWorkload(workload);
  options.num_experts = 32;
  options.num_ranks = 4;
  options.top_k = 2;
  options.tokens_per_rank = 500;
  return {{step, layer, 0}, SyntheticCounts(options, step, layer)};
}

const TraceHeader kHeader = {"m", 32, 2, 4, 2, {}};

// Everything again, plainly: all values kept, sorted, averaged.
struct Twin {
  std::vector<double> forward, before, copies, retention;
  int64_t infeasible = 0;

  void Plan(planner::PlanningProblem problem) {
    const auto plan = planner::Plan(problem);
    REQUIRE(plan.ok());
    std::vector<int64_t> loads, owned(problem.cluster.ranks.size(), 0);
    for (const RankPlan& rank : plan->ranks) loads.push_back(rank.forward_rows);
    for (int32_t s = 0; s < problem.counts.num_sources(); ++s)
      for (int32_t e = 0; e < problem.counts.num_experts(); ++e)
        owned[problem.owner[e]] += problem.counts.at(s, e);
    forward.push_back(Ratio(loads));
    before.push_back(Ratio(owned));
    int64_t transfers = 0;
    for (const InstancePlan& instance : plan->instances) {
      const auto& held = problem.resident[instance.rank_idx];
      const bool there = std::ranges::find(held, instance.expert_idx) != held.end() ||
                         problem.owner[instance.expert_idx] == instance.rank_idx;
      transfers += !there;
    }
    copies.push_back(static_cast<double>(transfers));
    retention.push_back(plan->retention_rate);
    infeasible += !plan->feasible;
    for (auto& list : resident) list.clear();
    for (const InstancePlan& instance : plan->instances)
      if (!instance.owner) resident[instance.rank_idx].push_back(instance.expert_idx);
  }
  static double Ratio(const std::vector<int64_t>& loads) {
    const auto total = std::accumulate(loads.begin(), loads.end(), int64_t{0});
    return static_cast<double>(*std::ranges::max_element(loads)) * static_cast<double>(loads.size()) /
           static_cast<double>(total);
  }
  std::vector<std::vector<int32_t>> resident = std::vector<std::vector<int32_t>>(4);
};

void CheckSpread(const Distribution& found, std::vector<double> values) {
  std::ranges::sort(values);
  const auto rank = static_cast<size_t>(std::ceil(0.95 * static_cast<double>(values.size())));
  CHECK(found.count() == static_cast<int64_t>(values.size()));
  CHECK(found.mean() ==
        Approx(std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size())));
  CHECK(found.min() == Approx(values.front()));
  CHECK(found.max() == Approx(values.back()));
  CHECK(found.Quantile(0.95) == Approx(values[rank - 1]).epsilon(0.0011));
}

TEST_CASE("a replay agrees with planning one by one", "[replay]") {
  for (const bool keep : {true, false}) {
    ReplayOptions options;
    options.policies = {"fixed", "lrmoe"};
    options.rank.replica_slots = 2;
    options.rank.memory_bytes = int64_t{1} << 20;
    options.model.hidden_size = 16;
    options.model.intermediate_size = 8;
    options.keep_residents = keep;
    options.policy.balance_tolerance = 0.02;
    auto replay = Replay::Create(options, kHeader);
    REQUIRE(replay.ok());
    std::map<std::pair<std::string, int32_t>, Twin> twins;  // by policy and layer
    for (int64_t step = 0; step < 40; ++step) {
      for (int32_t layer = 0; layer < 2; ++layer) {
        const TraceRecord record = Record(layer == 0 ? "W6" : "W2", step, layer);
        REQUIRE(replay->Add(record).ok());
        for (const std::string& policy : options.policies) {
          planner::PlanningProblem problem;
          problem.counts = record.counts;
          problem.cluster.ranks.assign(4, options.rank);
          problem.owner = ContiguousOwners(32, 4);
          problem.model = options.model;
          problem.policy = options.policy;
          problem.policy.planner = policy;
          problem.policy.on_infeasible = OnInfeasible::kBestEffort;
          Twin& twin = twins[{policy, layer}];
          if (!keep)
            for (auto& list : twin.resident) list.clear();
          problem.resident = twin.resident;
          twin.Plan(problem);
        }
      }
    }
    CHECK(replay->invocations() == 80);
    for (const PolicyOutcome& outcome : replay->outcomes()) {
      CAPTURE(outcome.policy, keep);
      Twin all = twins[{outcome.policy, 0}];
      const Twin& second = twins[{outcome.policy, 1}];
      const auto join = [](std::vector<double>& to, const std::vector<double>& from) {
        to.insert(to.end(), from.begin(), from.end());
      };
      join(all.forward, second.forward);
      join(all.before, second.before);
      join(all.copies, second.copies);
      join(all.retention, second.retention);
      CheckSpread(outcome.imbalance_forward, all.forward);
      CheckSpread(replay->imbalance_before(), all.before);
      CheckSpread(outcome.new_replicas, all.copies);
      CheckSpread(outcome.retention_rate, all.retention);
      CHECK(outcome.infeasible == all.infeasible + second.infeasible);
      CHECK(std::accumulate(outcome.load.begin(), outcome.load.end(), 0.0) == Approx(4));
    }
  }
}

TEST_CASE("sources are split and merged evenly", "[replay]") {
  Random random(9);
  for (int trial = 0; trial < 200; ++trial) {
    const auto sources = static_cast<int32_t>(random.Between(1, 12)), experts = 7;
    const auto ranks = static_cast<int32_t>(random.Between(1, 12));
    RoutedCounts counts(sources, experts);
    for (int32_t s = 0; s < sources; ++s)
      for (int64_t& n : counts.source(s)) n = random.Between(0, 50);
    const RoutedCounts out = RegroupSources(counts, ranks);
    REQUIRE(out.num_sources() == ranks);
    for (int32_t e = 0; e < experts; ++e) {
      int64_t before = 0, after = 0;
      for (int32_t s = 0; s < sources; ++s) before += counts.at(s, e);
      for (int32_t r = 0; r < ranks; ++r) {
        after += out.at(r, e);
        // The share of the interval [r, r + 1) / ranks in the sources that it meets.
        double share = 0;
        int32_t met = 0;
        for (int32_t s = 0; s < sources; ++s) {
          const double low = std::max(double(r) / ranks, double(s) / sources);
          const double high = std::min((r + 1.0) / ranks, (s + 1.0) / sources);
          if (high - low > 1e-9)
            share += (high - low) * sources * static_cast<double>(counts.at(s, e)), ++met;
        }
        CHECK(std::abs(static_cast<double>(out.at(r, e)) - share) <= 2.0 * met);
      }
      CHECK(after == before);
    }
  }
  RoutedCounts same(2, 2);
  same.at(0, 0) = 5;
  CHECK(RegroupSources(same, 2) == same);
}

TEST_CASE("a replay refuses what it cannot do", "[replay]") {
  ReplayOptions options;
  options.policies = {"lrmoe", "magic"};
  CHECK_THAT(std::string(Replay::Create(options, kHeader).status().message()),
             Catch::Contains("policy is \"magic\"; allowed: lrmoe, fixed"));
  options.policies = {"lrmoe"};
  options.policy.balance_tolerance = -1;
  CHECK_THAT(std::string(Replay::Create(options, kHeader).status().message()),
             Catch::Contains("balance_tolerance is \"-1\""));
}

TEST_CASE("quantiles are by nearest rank, within a thousandth", "[replay]") {
  Random random(4);
  for (int trial = 0; trial < 50; ++trial) {
    Distribution distribution;
    std::vector<double> values;
    for (int64_t n = random.Between(1, 3000); n > 0; --n) {
      values.push_back(random.Below(10) == 0 ? 0 : std::exp(20 * random.Uniform() - 5));
      distribution.Add(values.back());
    }
    std::ranges::sort(values);
    for (double q : {0.0, 0.5, 0.95, 0.99, 1.0}) {
      const auto rank =
          std::max<size_t>(1, static_cast<size_t>(std::ceil(q * static_cast<double>(values.size()))));
      CHECK(distribution.Quantile(q) >= values[rank - 1]);
      CHECK(distribution.Quantile(q) <= values[rank - 1] * 1.0011);
    }
  }
  CHECK(Distribution().Quantile(0.5) == 0);
}

TEST_CASE("a series keeps its shape in bounded memory", "[replay]") {
  Series series;
  double sum = 0;
  for (int i = 0; i < 100000; ++i) series.Add(i), sum += i;
  const auto points = series.points();
  CHECK(points.size() <= 512);
  CHECK(points.size() >= 256);
  for (const Series::Point& p : points) CHECK(p.mean == Approx(p.x));
  CHECK(points.back().max == 99999);
  Series few;
  few.Add(3);
  few.Add(5);
  REQUIRE(few.points().size() == 2);
  CHECK(few.points()[1].x == 1);
  CHECK(few.points()[1].mean == 5);
}

TEST_CASE("tokens become counts, invocation by invocation", "[replay]") {
  const std::string header =
      R"({"format": "routing-tokens","version":1,"model":"m","num_experts":3,"top_k":2})"
      "\n";
  const auto line = [](int step, int source, const char* indices) {
    return absl::StrCat("{\"step\":", step, ",\"layer\":0,\"source_rank\":", source,
                        ",\"num_tokens\":1,\"top_indices\":[", indices, "],\"top_weights\":[[1,1]]}\n");
  };
  const std::string first = line(0, 0, "[0,1]") + line(0, 1, "[2,1]");
  {
    const test::TemporaryFile file(header + first + line(1, 0, "[0,2]") + line(1, 1, "[0,1]"));
    auto source = TraceSource::Open(file.path());
    CAPTURE(source.status().ToString());
    REQUIRE(source.ok());
    CHECK(source->header().num_source_ranks == 2);
    TraceRecord record;
    REQUIRE(*source->Next(record));
    CHECK(record.counts.at(0, 1) == 1);
    CHECK(record.counts.at(1, 2) == 1);
    REQUIRE(*source->Next(record));
    CHECK(record.invocation.step == 1);
    CHECK(record.counts.at(1, 0) == 1);
    CHECK_FALSE(*source->Next(record));
    CHECK(source->Progress() == 1);
  }
  for (const auto& [text, part] : std::vector<std::pair<std::string, const char*>>{
           {first + line(1, 0, "[0,1]"), "step 1 layer 0 micro-batch 0 has 1 source ranks; allowed: 2"},
           {first + line(1, 1, "[0,1]"), "line 4: source_rank is 1; allowed: 0"},
           {first + line(1, 0, "[0,0]"), "line 4: top_indices[0][1] is 0"}}) {
    const test::TemporaryFile file(header + text);
    // Lines are read one ahead: a mistake may show with the invocation before it.
    auto source = TraceSource::Open(file.path());
    TraceRecord record;
    absl::StatusOr<bool> more = source.ok() ? source->Next(record) : source.status();
    if (more.ok()) more = source->Next(record);
    CAPTURE(text, more.status().ToString());
    CHECK_THAT(std::string(more.status().message()),
               Catch::StartsWith(file.path() + ": line ") && Catch::Contains(part));
  }
}

TEST_CASE("files that are none are refused", "[replay]") {
  CHECK_THAT(std::string(TraceSource::Open("/nonexistent/trace").status().message()),
             Catch::Contains("cannot open /nonexistent/trace"));
  CHECK_THAT(std::string(TraceSource::Open("/").status().message()), Catch::Contains("is a folder"));
}

TEST_CASE("the progress bar tells share and count", "[replay]") {
  CHECK(ProgressText("replay", 0.5, 1234) ==
        "replay [###############               ] 50 %, 1,234 invocations");
}

}  // namespace
}  // namespace lrmoe::sim
