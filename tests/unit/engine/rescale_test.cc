// Rescaling: kept pairs count for the dropped ones of their expert as well.
#include <catch2/catch.hpp>

#include "tests/support/engine/engine_runs.h"

using namespace lrmoe;
using namespace lrmoe::testing;

namespace {

constexpr int32_t kExperts = 5, kTopK = 2, kHidden = 24;

MoeProblem Problem(DataType type, const std::vector<int64_t>& split) {
  LayerShape shape;
  shape.num_experts = kExperts;
  shape.top_k = kTopK;
  shape.hidden_size = kHidden;
  shape.intermediate_size = 16;
  shape.dtype = type;
  return RandomProblem(shape, split, Routing::kSkewed, 77);
}

LayerOutput Run(const MoeProblem& problem, const ScriptedPlans& plans) {
  LayerOutput output;
  for (const absl::Status& status : RunLayer(problem, {{}, plans, {}}, output)) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
  return output;
}

// [E], of what was kept; 1 where nothing was, or everything.
std::vector<double> Factors(const MoeProblem& problem, const std::vector<uint8_t>& kept) {
  std::vector<double> all(kExperts, 0), left(kExperts, 0), factor(kExperts, 1);
  for (size_t p = 0; p < kept.size(); ++p) {
    ++all[problem.expert_idx[p]];
    left[problem.expert_idx[p]] += kept[p];
  }
  for (int32_t e = 0; e < kExperts; ++e)
    if (left[e] > 0) factor[e] = all[e] / left[e];
  return factor;
}

// dx and the experts' gradients are linear in alpha and y's pass needs no gradient of it: the zero-mask
// reference with scaled alpha is the twin, with d(alpha) from the unscaled one.
void CompareWithTwin(const MoeProblem& problem, const ScriptedPlans& plans, const LayerOutput& output) {
  const std::vector<double> factor = Factors(problem, output.kept);
  const bool exact = plans.router_gradient == RouterGradient::kExact;
  MoeProblem scaled = problem;
  MoeResult plain = ReferenceLayer(problem, output.kept, exact);
  for (size_t p = 0; p < output.kept.size(); ++p) {
    scaled.alpha[p] = static_cast<float>(scaled.alpha[p] * factor[problem.expert_idx[p]]);
    if (!exact) plain.dalpha[p] *= factor[problem.expert_idx[p]];
  }
  const MoeResult twin = ReferenceLayer(scaled, output.kept, exact);
  const double tolerance = problem.shape.dtype == DataType::kFp32 ? 1e-5 : 1e-2;
  CHECK(RelativeError(output.y, plain.y) < tolerance);
  CHECK(RelativeError(output.dalpha, plain.dalpha) < tolerance);
  CHECK(RelativeError(output.dx, twin.dx) < tolerance);
  for (int32_t e = 0; e < kExperts; ++e) {
    CHECK(RelativeError(output.dw1[e], twin.dw1[e]) < tolerance);
    CHECK(RelativeError(output.dw2[e], twin.dw2[e]) < tolerance);
  }
}

}  // namespace

TEST_CASE("rescaled gradients equal a zero-mask twin's times the factor: criteria, ranks, replicas, types") {
  for (const DataType type : {DataType::kFp32, DataType::kBf16})
    for (const Selection selection :
         {Selection::kLrm, Selection::kGradNorm2, Selection::kGradAbs, Selection::kRandom})
      for (const std::vector<int64_t>& split :
           {std::vector<int64_t>{48}, {24, 24}, {10, 0, 38}, {12, 12, 12, 12}})
        for (const double replicas : {0.0, 0.7}) {
          CAPTURE(std::string(Name(type)), std::string(Name(selection)), split, replicas);
          const MoeProblem problem = Problem(type, split);
          ScriptedPlans plans{.seed = 21, .replica_probability = replicas, .retention = 0.55};
          plans.selection = selection;
          plans.rescale = Rescale::kRows;
          plans.router_gradient = replicas > 0 ? RouterGradient::kRetained : RouterGradient::kExact;
          const LayerOutput output = Run(problem, plans);
          CompareWithTwin(problem, plans, output);
          plans.rescale = Rescale::kOff;
          REQUIRE(Run(problem, plans).kept == output.kept);
        }
}

TEST_CASE("rescaling with random quotas: none, some or all of an expert kept; bits repeat") {
  int none = 0, all = 0;
  for (uint64_t seed = 0; seed < 40; ++seed) {
    CAPTURE(seed);
    const MoeProblem problem = Problem(DataType::kFp32, {6, 5, 7});
    ScriptedPlans plans{.seed = seed, .replica_probability = 0.4, .retention = 0.5, .random_quotas = true};
    plans.rescale = Rescale::kRows;
    plans.router_gradient = seed % 2 == 0 ? RouterGradient::kExact : RouterGradient::kRetained;
    const LayerOutput output = Run(problem, plans);
    CompareWithTwin(problem, plans, output);
    REQUIRE(Run(problem, plans) == output);
    plans.rescale = Rescale::kOff;
    const LayerOutput off = Run(problem, plans);
    const std::vector<int64_t> counts = problem.Counts();
    std::vector<int64_t> kept(kExperts, 0);
    for (size_t p = 0; p < output.kept.size(); ++p) kept[problem.expert_idx[p]] += output.kept[p];
    for (int32_t e = 0; e < kExperts; ++e) {
      if (kept[e] != 0 && kept[e] != counts[e]) continue;
      (kept[e] == 0 ? none : all) += counts[e] > 0;
      REQUIRE(output.dw1[e] == off.dw1[e]);  // bit for bit
      REQUIRE(output.dw2[e] == off.dw2[e]);
    }
  }
  REQUIRE(none > 0);
  REQUIRE(all > 0);
}

TEST_CASE("rescaling changes no bit when everything is kept") {
  for (const DataType type : {DataType::kFp32, DataType::kBf16}) {
    const MoeProblem problem = Problem(type, {17, 14});
    ScriptedPlans plans{.seed = 2, .replica_probability = 0.5};
    const LayerOutput off = Run(problem, plans);
    plans.rescale = Rescale::kRows;
    REQUIRE(Run(problem, plans) == off);
  }
}
