// Published figures of the comparison policies on the Zipf workload: balancedness, the mean load over the
// highest, as printed, for seeds 0 to 4.
#include <catch2/catch.hpp>

#include "controller/planner/planner.h"
#include "controller/planner/policies/laer.h"
#include "tests/unit/planner/zipf_problem.h"

namespace lrmoe::planner {
namespace {

constexpr double kSkews[] = {0.5, 0.8, 1.2};

struct Size {
  int32_t experts, ranks, slots;
};

// Policies that plan from the past see the very counts they plan for.
LayerPlan PlanZipf(const char* policy, const Size& size, double skew, uint64_t seed) {
  PlanningProblem problem = ZipfProblem(size.experts, size.ranks, skew, seed, size.slots);
  problem.policy.planner = policy;
  problem.history = {ZipfRows(size.experts, int64_t{8192} * size.ranks, 8, skew, seed)};
  const auto plan = Plan(problem);
  REQUIRE(plan.ok());
  const absl::Status legal = CheckPlan(problem, *plan);
  CAPTURE(legal.ToString());
  REQUIRE(legal.ok());
  return *plan;
}

struct Mean {
  double balancedness = 0, copies = 0;
};

Mean MeanOfSeeds(const char* policy, const Size& size, double skew) {
  Mean out;
  for (uint64_t seed = 0; seed < 5; ++seed) {
    const LayerPlan plan = PlanZipf(policy, size, skew, seed);
    out.balancedness += 1 / plan.imbalance.forward / 5;
    out.copies += plan.new_replicas / 5.0;
  }
  return out;
}

void CheckSeeds(const char* policy, const Size& size, const std::vector<std::vector<double>>& published) {
  for (size_t skew = 0; skew < 3; ++skew) {
    for (uint64_t seed = 0; seed < 5; ++seed) {
      CAPTURE(policy, size.experts, size.slots, kSkews[skew], seed);
      const LayerPlan plan = PlanZipf(policy, size, kSkews[skew], seed);
      CHECK(1 / plan.imbalance.forward == Approx(published[skew][seed]).margin(1e-4).epsilon(0));
    }
  }
}

struct Published {
  double balancedness;
  double copies = -1;  // not published
};

// Means over the seeds, printed with three digits; copies with one, or none where there are many.
void CheckMeans(const char* policy, const Size& size, const std::vector<Published>& published) {
  for (size_t skew = 0; skew < 3; ++skew) {
    if (published[skew].balancedness < 0) continue;
    CAPTURE(policy, size.experts, size.slots, kSkews[skew]);
    const Mean mean = MeanOfSeeds(policy, size, kSkews[skew]);
    CHECK(mean.balancedness == Approx(published[skew].balancedness).margin(6e-4).epsilon(0));
    if (published[skew].copies < 0) continue;
    CHECK(mean.copies == Approx(published[skew].copies).margin(size.ranks > 8 ? 1.0 : 0.01).epsilon(0));
  }
}

constexpr Published kUnknown{-1};

TEST_CASE("fixed ownership on the Zipf workload", "[published]") {
  CheckMeans("fixed", {128, 8, 1}, {{.764, 0}, {.565, 0}, {.508, 0}});
  CheckMeans("fixed", {256, 64, 1}, {{.345, 0}, {.145, 0}, {.103, 0}});
}

TEST_CASE("UltraEP, seed by seed", "[published]") {
  CheckSeeds("ultraep", {128, 8, 1},
             {{.9651, .9901, .9778, .9480, .9641},
              {.9726, .9585, .9727, .9538, .9730},
              {.9108, .7799, .9190, .8765, .9393}});
  CheckSeeds("ultraep", {128, 8, 2},
             {{.9901, .9901, .9901, .9901, .9901},
              {.9901, .9901, .9901, .9901, .9901},
              {.9536, .9901, .9702, .9718, .9901}});
  CheckSeeds("ultraep", {256, 64, 1},
             {{.9631, .9530, .9643, .9643, .9646},
              {.9295, .9039, .9311, .9317, .9314},
              {.9139, .8539, .9156, .9005, .9096}});
  CheckMeans("ultraep", {128, 8, 1}, {{.969, 4.6}, {.966, 4.6}, {.885, 4.0}});
  CheckMeans("ultraep", {128, 8, 2}, {kUnknown, {.990, 5.8}, {.975, 6.6}});
  CheckMeans("ultraep", {256, 64, 1}, {{.962, 41}, {.926, 39}, {.899, 42}});
}

TEST_CASE("ECHO, both packings", "[published]") {
  CheckMeans("echo", {128, 8, 1}, {{.950, 5.0}, {.931, 5.0}, {.914, 4.6}});
  CheckMeans("echo", {128, 8, 2}, {kUnknown, {.998, 7.4}, {.967, 7.0}});
  CheckMeans("echo", {256, 64, 1}, {{.910, 42}, {.893, 47}, {.919, 51}});
}

TEST_CASE("MoonEP balances exactly within two slots", "[published]") {
  CheckMeans("moonep", {128, 8, 2}, {{1.0, 7.2}, {1.0, 7.4}, {1.0, 7.4}});
  CheckMeans("moonep", {256, 64, 1}, {{1.0, 63}, {1.0, 63}, {1.0, 63}});
}

TEST_CASE("LLEP with slots for all it asks for", "[published]") {
  // At skew 0.5 seeds 1 and 2 are below its trigger of 1.3; the figure is of the planner without it.
  CheckMeans("llep", {128, 8, 16}, {kUnknown, {1.0, 7.6}, {1.0, 7.8}});
  for (uint64_t seed : {0, 3, 4}) CHECK(PlanZipf("llep", {128, 8, 16}, 0.5, seed).imbalance.forward < 1.001);
  for (uint64_t seed : {1, 2}) CHECK(PlanZipf("llep", {128, 8, 16}, 0.5, seed).new_replicas == 0);
  CheckMeans("llep", {256, 64, 6}, {{.999, 63}, {1.0, 64}, {1.0, 64}});
}

TEST_CASE("EPLB, every seed alike", "[published]") {
  const auto all = [](double value) { return std::vector<double>(5, value); };
  CheckSeeds("eplb", {128, 8, 1}, {all(.9998), all(.9996), all(.9997)});
  CheckSeeds("eplb", {128, 8, 2}, {all(1.0), all(.9996), all(.9997)});
  CheckSeeds("eplb", {256, 64, 1}, {all(.9944), all(.9965), all(.9461)});
}

TEST_CASE("SYMI and SmartMoE", "[published]") {
  CheckMeans("symi", {128, 8, 1}, {{.832}, {.687}, {.578}});
  CheckMeans("symi", {128, 8, 2}, {kUnknown, {.757}, {.635}});
  CheckMeans("symi", {256, 64, 1}, {{.757}, {.496}, {.276}});
  CheckMeans("smartmoe", {128, 8, 1}, {{.950}, {.826}, {.879}});
  CheckMeans("smartmoe", {256, 64, 1}, {{.402}, {.162}, {.124}});
}

TEST_CASE("LAER's layouts, eight ranks per node, rows even over copies", "[published]") {
  CheckMeans("laer", {128, 8, 1}, {{.9998}, {.9996}, {.9997}});
  const double published[] = {.9955, .953, .881};
  for (size_t skew = 0; skew < 3; ++skew) {
    CAPTURE(kSkews[skew]);
    double mean = 0;
    for (uint64_t seed = 0; seed < 5; ++seed) {
      PlanningProblem problem = ZipfProblem(256, 64, kSkews[skew], seed, 1);
      for (int32_t g = 0; g < 64; ++g) problem.cluster.ranks[g].node = g / 8;
      const Workload work = MakeWorkload(problem);
      problem.history = {work.rows};
      const PlacedRows placed = EvenOverCopies(problem, work, LaerLayout(problem, work));
      std::vector<int64_t> load(64, 0);
      for (int32_t i = 0; i < placed.size(); ++i) load[placed.rank[i]] += placed.forward[i];
      mean += static_cast<double>(work.total) / 64 /
              static_cast<double>(*std::max_element(load.begin(), load.end())) / 5;
    }
    CHECK(mean == Approx(published[skew]).margin(6e-4).epsilon(0));
  }
}

// UltraEP's own workload, 256 experts on 64 ranks, in expectation instead of sampled: ranks weigh
// rank^-alpha, the experts of one i^-4, every token takes eight distinct experts.
PlanningProblem RankSkewProblem(double alpha) {
  std::vector<double> weight(256);
  for (int32_t e = 0; e < 256; ++e) weight[e] = std::pow(e / 4 + 1, -alpha) * std::pow(e % 4 + 1, -4);
  double low = 0, high = 1e6;
  for (int step = 0; step < 200; ++step) {
    const double middle = (low + high) / 2;
    double chosen = 0;
    for (double w : weight) chosen += 1 - std::exp(-middle * w);
    (chosen < 8 ? low : high) = middle;
  }
  PlanningProblem problem = ZipfProblem(256, 64, 0, 0, 2);
  for (int32_t e = 0; e < 256; ++e)
    for (int32_t s = 0; s < 64; ++s)
      problem.counts.at(s, e) = std::llround(8192 * (1 - std::exp(-high * weight[e])));
  return problem;
}

TEST_CASE("UltraEP on its own workload: imbalance, replicas per expert and in all", "[published]") {
  struct Row {
    double alpha, before;
    int64_t most, total;
  };
  for (const Row& row : {Row{.140, 1.51, 4, 38}, Row{.244, 2.01, 5, 46}, Row{.408, 3.03, 6, 51}}) {
    CAPTURE(row.before);
    PlanningProblem problem = RankSkewProblem(row.alpha);
    problem.policy.planner = "ultraep";
    const auto plan = Plan(problem);
    REQUIRE(plan.ok());
    std::vector<int64_t> replicas(256, 0);
    for (const InstancePlan& instance : plan->instances) replicas[instance.expert_idx] += !instance.owner;
    CHECK(plan->imbalance.before == Approx(row.before).margin(0.01).epsilon(0));
    CHECK(plan->imbalance.forward == Approx(1.01).margin(1e-4).epsilon(0));
    CHECK(*std::max_element(replicas.begin(), replicas.end()) == row.most);
    CHECK(std::abs(plan->new_replicas - row.total) <= 2);
    problem.policy.planner = "echo";
    CHECK(Plan(problem)->imbalance.forward <= 1.0034);
    CHECK(std::abs(Plan(problem)->new_replicas - 62.5) <= 0.5);
  }
}

}  // namespace
}  // namespace lrmoe::planner
