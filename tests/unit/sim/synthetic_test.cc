#include "common/synthetic_routing.h"

#include <catch2/catch.hpp>
#include <numeric>
#include <set>

#include "common/cluster.h"
#include "common/random.h"

namespace lrmoe {
namespace {

int64_t Sum(std::span<const int64_t> values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

std::vector<int64_t> RankLoads(const RoutedCounts& counts) {
  const std::vector<int32_t> owner = ContiguousOwners(counts.num_experts(), counts.num_sources());
  std::vector<int64_t> out(counts.num_sources(), 0);
  for (int32_t s = 0; s < counts.num_sources(); ++s)
    for (int32_t e = 0; e < counts.num_experts(); ++e) out[owner[e]] += counts.at(s, e);
  return out;
}

double Imbalance(const RoutedCounts& counts) {
  const std::vector<int64_t> loads = RankLoads(counts);
  return static_cast<double>(*std::ranges::max_element(loads)) * static_cast<double>(loads.size()) /
         static_cast<double>(Sum(loads));
}

SyntheticOptions Options(const char* workload) {
  SyntheticOptions options;
  options.workload = *ParseSyntheticWorkload(workload);
  options.tokens_per_rank = 1000;
  options.seed = 7;
  return options;
}

const char* const kAll[] = {"W0", "W1", "W2", "W3", "W4", "W5", "W6", "W7", "zipf:0.8", "zipf:0", "zipf:10"};

// Lays the pairs of a source out over its tokens in turn; distinct experts exactly when this works.
bool TokensCanHaveDistinctExperts(std::span<const int64_t> counts, int64_t tokens, int32_t top_k) {
  std::vector<std::set<size_t>> chosen(tokens);
  int64_t next = 0;
  for (size_t e = 0; e < counts.size(); ++e)
    for (int64_t i = 0; i < counts[e]; ++i)
      if (!chosen[next++ % tokens].insert(e).second) return false;
  for (const auto& experts : chosen)
    if (static_cast<int32_t>(experts.size()) != top_k) return false;
  return true;
}

TEST_CASE("every token has exactly top_k distinct experts", "[synthetic]") {
  Random random(5);
  for (const char* workload : kAll) {
    for (int trial = 0; trial < 12; ++trial) {
      SyntheticOptions options = Options(workload);
      options.num_experts = static_cast<int32_t>(random.Between(1, 40));
      options.num_ranks = static_cast<int32_t>(random.Between(1, 9));
      options.top_k = static_cast<int32_t>(random.Between(1, std::min(options.num_experts, 9)));
      options.tokens_per_rank = random.Between(0, 60);
      options.seed = random.Next();
      REQUIRE(Validate(options).ok());
      CAPTURE(workload, options.num_experts, options.num_ranks, options.top_k, options.tokens_per_rank);
      const RoutedCounts counts = SyntheticCounts(options, trial % 9, trial % 3);
      int64_t all_tokens = 0;
      for (int32_t s = 0; s < options.num_ranks; ++s) {
        REQUIRE(Sum(counts.source(s)) % options.top_k == 0);
        const int64_t tokens = Sum(counts.source(s)) / options.top_k;
        all_tokens += tokens;
        if (options.workload.kind < SyntheticKind::kRaggedSources) CHECK(tokens == options.tokens_per_rank);
        if (tokens > 0) CHECK(TokensCanHaveDistinctExperts(counts.source(s), tokens, options.top_k));
      }
      if (options.workload.kind != SyntheticKind::kZeroLoad)
        CHECK(all_tokens == options.tokens_per_rank * options.num_ranks);
    }
  }
}

TEST_CASE("an invocation depends on workload, seed, step and layer, and on nothing else", "[synthetic]") {
  for (const char* workload : kAll) {
    CAPTURE(workload);
    const SyntheticOptions options = Options(workload);
    const RoutedCounts later = SyntheticCounts(options, 17, 2);
    SyntheticCounts(options, 3, 1);
    CHECK(SyntheticCounts(options, 17, 2) == later);
    if (options.workload.kind == SyntheticKind::kBalanced) continue;
    CHECK_FALSE(SyntheticCounts(options, 18, 2) == later);
    CHECK_FALSE(SyntheticCounts(options, 17, 3) == later);
    SyntheticOptions other = options;
    other.seed = 8;
    CHECK_FALSE(SyntheticCounts(other, 17, 2) == later);
  }
}

TEST_CASE("the workloads are what their names say", "[synthetic]") {
  CHECK(Imbalance(SyntheticCounts(Options("W0"), 5, 0)) < 1.001);
  CHECK(Imbalance(SyntheticCounts(Options("W1"), 5, 0)) > 1.2);
  CHECK(Imbalance(SyntheticCounts(Options("W2"), 5, 0)) > 2.5);
  CHECK(Imbalance(SyntheticCounts(Options("W3"), 5, 0)) < 1.1);

  const RoutedCounts ragged = SyntheticCounts(Options("W4"), 0, 0);
  CHECK(Sum(ragged.source(0)) == 0);
  CHECK(Sum(ragged.source(7)) == 2000 * 8);

  const RoutedCounts idle = SyntheticCounts(Options("W5"), 0, 0);
  CHECK(RankLoads(idle)[3] == 0);
  CHECK(Sum(idle.source(3)) == 0);
  CHECK(idle.at(0, 1) == 0);
  CHECK(idle.at(0, 0) > 0);

  // The hottest rank moves on; its place in the next step is a neighbour's.
  const auto hottest = [](int64_t step) {
    const std::vector<int64_t> loads = RankLoads(SyntheticCounts(Options("W6"), step, 0));
    return std::ranges::max_element(loads) - loads.begin();
  };
  std::set<int64_t> places;
  for (int64_t step = 0; step < 16; ++step) places.insert(hottest(step));
  CHECK(places.size() == 8);

  CHECK(Imbalance(SyntheticCounts(Options("W7"), 6, 0)) < 1.1);
  CHECK(Imbalance(SyntheticCounts(Options("W7"), 7, 0)) > 1.5);
}

// reference: balancedness (mean over max) of contiguous ownership on the literature's generator, 128 experts
// on 8 ranks, 8192 tokens each, mean of seeds 0..4.
TEST_CASE("step 0 of Zipf is the literature's generator", "[synthetic]") {
  for (const auto& [workload, balancedness] : std::vector<std::pair<const char*, double>>{
           {"zipf:0.5", .764}, {"zipf:0.8", .565}, {"zipf:1.2", .508}}) {
    SyntheticOptions options = Options(workload);
    options.tokens_per_rank = 8192;
    double mean = 0;
    for (options.seed = 0; options.seed < 5; ++options.seed)
      mean += 0.2 / Imbalance(SyntheticCounts(options, 0, 0));
    CHECK(mean == Approx(balancedness).margin(0.0006));
  }
}

TEST_CASE("workloads and their options are refused with field, value and range", "[synthetic]") {
  for (const char* bad :
       {"", "W8", "w1", "W01", "zipf", "zipf:", "zipf:-1", "zipf:11", "zipf:nan", "zipf:1x"}) {
    CAPTURE(bad);
    CHECK_THAT(std::string(ParseSyntheticWorkload(bad).status().message()),
               Catch::Contains("allowed: W0..W7, or zipf:ALPHA with ALPHA from 0 to 10"));
  }
  for (const char* good : kAll) CHECK(ToString(*ParseSyntheticWorkload(good)) == good);
  SyntheticOptions options;
  options.top_k = 129;
  CHECK(Validate(options).message() == "top_k is 129; allowed: 1..64");
  options.num_experts = 4097;
  CHECK(Validate(options).message() == "experts is 4097; allowed: 1..4096");
}

}  // namespace
}  // namespace lrmoe
