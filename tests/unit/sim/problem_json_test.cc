#include "tools/sim/problem_json.h"

#include <catch2/catch.hpp>
#include <nlohmann/json.hpp>

#include "common/plan_json.h"
#include "common/random.h"
#include "controller/planner/planner.h"
#include "tests/unit/sim/damage.h"

namespace lrmoe::sim {
namespace {

const char kFull[] = R"({"format": "lrmoe-planning-problem", "version": 1, "counts": [[9, 1, 0], [8, 0, 2]],
  "ranks": [{"node": 0, "replica_slots": 1, "memory_bytes": 1000000, "rows_per_ms": 5.5}, {}], "owner": [0, 0, 1],
  "resident": [[2], [0]], "history": [[20, 1, 3], [0, 0, 0]], "model": {"hidden_size": 16, "intermediate_size": 8, "gated": false, "weight_bytes": 4,
  "gradient_bytes": 4}, "bandwidth": {"intra_node_gb_per_s": 100, "inter_node_gb_per_s": 10}, "window_us": 1e6,
  "rates": [1, 0.5], "retention_floor": 0.1, "balance_tolerance": 0.05, "on_infeasible": "best_effort"})";

TEST_CASE("a full problem is read as written", "[sim]") {
  const auto problem = ReadProblem(kFull);
  CAPTURE(problem.status().ToString());
  REQUIRE(problem.ok());
  CHECK(problem->counts.at(1, 2) == 2);
  CHECK(problem->cluster.ranks[0].rows_per_ms == 5.5);
  CHECK(problem->cluster.ranks[0].memory_bytes == 1000000);
  CHECK(problem->cluster.ranks[1] == RankResources{});
  CHECK(problem->resident == std::vector<std::vector<int32_t>>{{2}, {0}});
  CHECK(problem->history == std::vector<std::vector<int64_t>>{{20, 1, 3}, {0, 0, 0}});
  CHECK_FALSE(problem->model.gated);
  CHECK(problem->cluster.bandwidth.inter_node_gb_per_s == 10);
  CHECK(problem->policy.window_us == 1e6);
  CHECK(problem->policy.rates == std::vector<double>{1, 0.5});
  CHECK(problem->policy.on_infeasible == OnInfeasible::kBestEffort);
}

TEST_CASE("the three required keys suffice", "[sim]") {
  const auto problem = ReadProblem(R"({"counts": [[1, 2], [3, 4]], "ranks": [{}, {}], "owner": [0, 1]})");
  REQUIRE(problem.ok());
  CHECK(problem->policy == Policy{});
  CHECK(problem->resident.empty());
}

TEST_CASE("every mistake is named with field, value and what is allowed", "[sim]") {
  const std::string base = R"("counts": [[1, 2], [3, 4]], "ranks": [{}, {}], "owner": [0, 1])";
  for (const auto& [text, part] : std::vector<std::pair<std::string, const char*>>{
           {"", "not JSON"},
           {"[]", "the problem is []; allowed: an object"},
           {"{" + base + ", \"colour\": 1}", "unknown key \"colour\""},
           {"{" + base + ", \"owner\": [0, 1]}", "key \"owner\" appears twice"},
           {"{" + base + ", \"format\": \"x\"}", "format is \"x\""},
           {"{" + base + ", \"version\": 2}", "version is 2; allowed: 1"},
           {"{" + base + ", \"rates\": [0.5, 0.7]}", "strictly descending"},
           {"{" + base + ", \"rates\": 1}", "rates is 1; allowed: a list"},
           {"{" + base + ", \"window_us\": \"inf\"}", "window_us is \"inf\"; allowed: a number"},
           {"{" + base + ", \"on_infeasible\": \"cry\"}", "on_infeasible is \"cry\""},
           {"{" + base + ", \"model\": {\"gated\": 1}}", "model.gated is 1; allowed: true, false"},
           {"{" + base + ", \"model\": {\"optimizer_on_device\": \"yes\"}}",
            "model.optimizer_on_device is \"yes\"; allowed: true, false"},
           {"{" + base + ", \"model\": {\"hidden_size\": 0}}", "model.hidden_size is 0; allowed: 1..65536"},
           {"{" + base + ", \"bandwidth\": {\"intra_node_gb_per_s\": 0}}",
            "bandwidth.intra_node_gb_per_s is 0"},
           {"{" + base + ", \"resident\": [[1], [1]]}", "resident[1][0] is 1"},
           {"{" + base + ", \"history\": [[1, 2], [-1, 2]]}", "history[1][0] is -1"},
           {"{" + base + ", \"history\": [[1]]}",
            "history[0] is 1 entries; allowed: one per column of counts (2)"},
           {"{" + base + ", \"history\": 3}", "history is 3; allowed: a list"},
           {R"({"counts": [[1, 2]], "ranks": [{}]})", "key \"owner\" is missing"},
           {R"({"counts": [[1, 2], [3]], "ranks": [{}, {}], "owner": [0, 1]})",
            "counts[1] is a list of 1 values"},
           {R"({"counts": [[1, -2]], "ranks": [{}], "owner": [0, 0]})", "counts[0][1] is -2"},
           {R"({"counts": [[1, 1.5]], "ranks": [{}], "owner": [0, 0]})", "counts[0][1] is 1.5"},
           {R"({"counts": [[1, 1099511627777]], "ranks": [{}], "owner": [0, 0]})", "to 1099511627776"},
           {R"({"counts": [[1, 18446744073709551615]], "ranks": [{}], "owner": [0, 0]})", "counts[0][1] is"},
           {R"({"counts": [], "ranks": [], "owner": []})", "counts is []"},
           {R"({"counts": [[1]], "ranks": [{"slots": 1}], "owner": [0]})",
            "unknown key \"slots\" in ranks[0]"},
           {R"({"counts": [[1]], "ranks": [{"rows_per_ms": 0}], "owner": [0]})", "ranks[0].rows_per_ms is 0"},
           {R"({"counts": [[1]], "ranks": [{}, {}], "owner": [0]})", "ranks is 2 entries"},
           {R"({"counts": [[1]], "ranks": [{}], "owner": [1]})", "owner[0] is 1; allowed: 0..0"}}) {
    CAPTURE(text);
    const auto problem = ReadProblem(text);
    CHECK(problem.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(problem.status().message()), Catch::Contains(part));
  }
}

TEST_CASE("residents are checked by the rules of the policy", "[sim]") {
  const std::string exchanged = R"({"counts": [[1, 2, 3, 4], [3, 4, 5, 6]], "ranks": [{}, {}],
                                    "owner": [0, 0, 1, 1], "resident": [[2, 3], [0, 1]]})";
  CHECK_THAT(std::string(ReadProblem(exchanged).status().message()), Catch::Contains("replica_slots"));
  const auto problem = ReadProblem(exchanged, "smartmoe");
  REQUIRE(problem.ok());
  CHECK(planner::Plan(*problem)->new_replicas == 0);
}

TEST_CASE("damaged problems are read or refused, never worse", "[sim]") {
  Random random(11);
  int read = 0;
  for (int trial = 0; trial < 20000; ++trial) {
    const std::string text = test::Damaged(kFull, random);
    CAPTURE(text);
    const auto problem = ReadProblem(text);
    if (!problem.ok()) {
      CHECK(problem.status().code() == absl::StatusCode::kInvalidArgument);
      // A place in the text, or the field with what it may be.
      CHECK_THAT(std::string(problem.status().message()),
                 Catch::Contains("line ") || Catch::Contains("allowed: ") || Catch::Contains("known: ") ||
                     Catch::Contains("is missing from") || Catch::Contains("appears twice") ||
                     Catch::Contains("nested more than"));
      continue;
    }
    ++read;
    const auto plan = planner::Plan(*problem);
    if (plan.ok()) CHECK(planner::CheckPlan(*problem, *plan).ok());
  }
  CHECK(read > 100);
}

TEST_CASE("optimizer state on the device counts for owned experts, 12 bytes per parameter", "[sim]") {
  const auto experts = [](const std::string& optimizer) {
    const auto problem = ReadProblem(R"({"counts": [[90, 5], [90, 5]], "ranks": [{}, {}], "owner": [0, 1],
                        "model": {"hidden_size": 16, "intermediate_size": 8)" +
                                     optimizer + "}}");
    REQUIRE(problem.ok());
    const auto plan = planner::Plan(*problem);
    REQUIRE(plan.ok());
    REQUIRE(plan->ranks[1].memory_bytes.replicas > 0);
    return plan->ranks[1].memory_bytes;
  };
  const int64_t parameters = 3 * 16 * 8;
  CHECK(experts("").experts == parameters * (2 + 4));
  CHECK(experts(R"(, "optimizer_on_device": true)").experts == parameters * (2 + 4 + 12));
  CHECK(experts(R"(, "optimizer_on_device": true)").replicas == experts("").replicas);
}

TEST_CASE("the plan's JSON has the fixed fields", "[sim]") {
  const auto problem = ReadProblem(R"({"counts": [[90, 5], [90, 5]], "ranks": [{}, {}], "owner": [0, 1],
                                       "model": {"hidden_size": 16, "intermediate_size": 8}})");
  REQUIRE(problem.ok());
  const auto plan = planner::Plan(*problem);
  REQUIRE(plan.ok());
  const nlohmann::ordered_json json = PlanToJson(*plan);
  std::vector<std::string> keys;
  for (const auto& [key, value] : json.items()) keys.push_back(key);
  CHECK(keys == std::vector<std::string>{"format", "version", "policy", "feasible", "retention_rate", "quota",
                                         "instances", "ranks", "imbalance", "new_replicas", "predicted_us",
                                         "rejected", "plan_us"});
  CHECK(json["instances"][1] ==
        nlohmann::ordered_json::parse(
            R"({"expert": 0, "rank": 1, "owner": false, "new": true, "forward_rows": 85,
                                          "backward_rows": 85, "forward_rows_by_source": [0, 85]})"));
  CHECK(json["ranks"][0]["memory_bytes"]["total"] == plan->ranks[0].memory_bytes.total());
}

}  // namespace
}  // namespace lrmoe::sim
