// lrm_sampled keeps as many pairs as lrm, and on average over draws loses nothing; nor does random when
// rescaled by rows.
#include <catch2/catch.hpp>
#include <cmath>
#include <numeric>

#include "common/status_macros.h"
#include "tests/support/engine/engine_runs.h"

using namespace lrmoe;
using namespace lrmoe::testing;

namespace {

constexpr int32_t kDraws = 600;

struct Mean {
  double bias = 0;   // |mean over draws - complete| / |complete|, of the experts' gradients
  double error = 0;  // the same of a single draw
};

double Distance(const std::vector<std::vector<float>>& mine, double scale, const MoeResult& complete) {
  double difference = 0, whole = 0;
  for (size_t e = 0; e < mine.size(); ++e)
    for (size_t i = 0; i < mine[e].size(); ++i) {
      const double wanted = complete.dw1[e][i];
      difference += std::pow(mine[e][i] * scale - wanted, 2);
      whole += wanted * wanted;
    }
  return std::sqrt(difference / whole);
}

Mean Measure(Selection selection, Rescale rescale = Rescale::kOff) {
  const MoeProblem problem = RandomProblem(SmallShape(), {14, 0, 18}, Routing::kUniform, 5);
  const std::vector<uint8_t> all(problem.expert_idx.size(), 1);
  const MoeResult complete = ReferenceLayer(problem, all, true);
  ScriptedPlans plans{.seed = 3, .replica_probability = 0.5, .retention = 0.5, .selection = selection};
  plans.rescale = rescale;
  LayerOutput one, sum;
  for (const absl::Status& status : RunLayer(problem, {{}, plans, {}}, one)) REQUIRE(status.ok());
  const auto draws = [](RankRun& run) -> absl::Status {
    for (int32_t m = 0; m < kDraws; ++m) {
      LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, m}).status());
      LRMOE_RETURN_IF_ERROR(run.Backward({1, 0, m}).status());
    }
    run.ReadGradients(0);
    return absl::OkStatus();
  };
  for (const absl::Status& status : RunRanks(problem, {{}, plans, {}}, sum, draws)) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
  return {Distance(sum.dw1, 1.0 / kDraws, complete), Distance(one.dw1, 1.0, complete)};
}

}  // namespace

TEST_CASE("sampled selection is unbiased, the largest scores are not") {
  const Mean sampled = Measure(Selection::kLrmSampled), lrm = Measure(Selection::kLrm),
             random = Measure(Selection::kRandom);
  CAPTURE(sampled.bias, sampled.error, lrm.bias, lrm.error, random.bias, random.error);
  REQUIRE(sampled.bias < 0.05);  // error / sqrt(draws), and some room
  REQUIRE(sampled.bias < 0.2 * lrm.bias);
  REQUIRE(random.bias > 0.4);  // half of the pairs, none of them enlarged
  REQUIRE(sampled.error < 1.0);
}

TEST_CASE("random selection rescaled by rows is unbiased, a rescaled one of the largest is not") {
  const Mean rescaled = Measure(Selection::kRandom, Rescale::kRows),
             largest = Measure(Selection::kLrm, Rescale::kRows);
  CAPTURE(rescaled.bias, rescaled.error, largest.bias);
  REQUIRE(rescaled.bias < 0.1);
  REQUIRE(largest.bias > 3 * rescaled.bias);
}

TEST_CASE("sampled selection keeps what the plan says, and is complete when everything is kept") {
  const MoeProblem problem = RandomProblem(SmallShape(), {9, 11}, Routing::kSkewed, 6);
  for (const double retention : {1.0, 0.6}) {
    ScriptedPlans plans{.seed = 4, .retention = retention, .selection = Selection::kLrmSampled};
    LayerOutput output;
    for (const absl::Status& status : RunLayer(problem, {{}, plans, {}}, output)) REQUIRE(status.ok());
    std::vector<int64_t> kept(4, 0);
    for (size_t p = 0; p < output.kept.size(); ++p) kept[problem.expert_idx[p]] += output.kept[p];
    const std::vector<int64_t> counts = problem.Counts();
    for (size_t e = 0; e < kept.size(); ++e)
      REQUIRE(kept[e] == static_cast<int64_t>(std::ceil(retention * static_cast<double>(counts[e]))));
    if (retention < 1.0) continue;
    const MoeResult complete = ReferenceLayer(problem, output.kept, true);
    REQUIRE(RelativeError(output.dx, complete.dx) < 1e-5);
  }
}
