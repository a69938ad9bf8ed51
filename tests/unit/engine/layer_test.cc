// The whole layer, forward and compact backward, against the fp64 reference.
#include <algorithm>
#include <catch2/catch.hpp>
#include <cmath>
#include <iostream>
#include <limits>
#include <map>

#include "common/random.h"
#include "common/status_macros.h"
#include "tests/support/engine/engine_runs.h"

using namespace lrmoe;
using namespace lrmoe::testing;

namespace {

// Worst relative error by tensor and type over all cases of this program, printed at the end.
struct Worst {
  std::map<std::string, double> error;
  ~Worst() {
    for (const auto& [name, value] : error)
      std::cout << "worst relative error, " << name << ": " << value << "\n";
  }
  double Note(const LayerShape& shape, const std::string& tensor, double value) {
    double& worst = error[std::string(Name(shape.dtype)) + " " + tensor];
    worst = std::max(worst, value);
    return value;
  }
};
Worst worst;

LayerShape Shape(int32_t experts, int32_t k, int32_t h, int32_t f, DataType type) {
  LayerShape shape;
  shape.num_experts = experts;
  shape.top_k = k;
  shape.hidden_size = h;
  shape.intermediate_size = f;
  shape.dtype = type;
  return shape;
}

double Tolerance(DataType type) {
  return type == DataType::kFp32 ? 1e-5 : 1e-2;
}

void RequireOk(const std::vector<absl::Status>& statuses) {
  for (const absl::Status& status : statuses) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
}

void RequireKeptAsPlanned(const MoeProblem& problem, const std::vector<uint8_t>& kept,
                          const PlanFunction& plan) {
  RoutedCounts counts(static_cast<int32_t>(problem.tokens_of_rank.size()), problem.shape.num_experts);
  size_t p = 0;
  for (int32_t s = 0; s < counts.num_sources(); ++s)
    for (int64_t i = 0; i < problem.tokens_of_rank[s] * problem.shape.top_k; ++i)
      ++counts.at(s, problem.expert_idx[p++]);
  const ExecutionPlan execution = *plan({1, 0, 0}, counts);
  std::vector<int64_t> of_expert(problem.shape.num_experts, 0);
  for (size_t i = 0; i < kept.size(); ++i) {
    REQUIRE(kept[i] <= 1);
    of_expert[problem.expert_idx[i]] += kept[i];
  }
  REQUIRE(of_expert == execution.plan.quota);
}

// Compares with the reference that zero-masks exactly the pairs the engine dropped; `gradient_scale` forwards
// and backwards of the same tensors were accumulated.
void CompareWithReference(const MoeProblem& problem, const LayerOutput& output, bool exact,
                          double gradient_scale = 1) {
  MoeResult reference = ReferenceLayer(problem, output.kept, exact);
  const double tolerance = Tolerance(problem.shape.dtype);
  CHECK(worst.Note(problem.shape, "y", RelativeError(output.y, reference.y)) < tolerance);
  CHECK(worst.Note(problem.shape, "dx", RelativeError(output.dx, reference.dx)) < tolerance);
  CHECK(worst.Note(problem.shape, "dalpha", RelativeError(output.dalpha, reference.dalpha)) < tolerance);
  for (int32_t e = 0; e < problem.shape.num_experts; ++e) {
    for (double& v : reference.dw1[e]) v *= gradient_scale;
    for (double& v : reference.dw2[e]) v *= gradient_scale;
    CHECK(worst.Note(problem.shape, "dW1", RelativeError(output.dw1[e], reference.dw1[e])) < tolerance);
    CHECK(worst.Note(problem.shape, "dW2", RelativeError(output.dw2[e], reference.dw2[e])) < tolerance);
  }
}

std::vector<int64_t> UnevenTokens(int32_t num_ranks, int64_t base, uint64_t seed) {
  Random random(seed);
  std::vector<int64_t> tokens;
  for (int32_t r = 0; r < num_ranks; ++r) tokens.push_back(base + random.Between(-base / 2, base / 2));
  return tokens;
}

}  // namespace

TEST_CASE("the layer equals the reference: types, ranks, retention, placement, router gradient") {
  for (const DataType type : {DataType::kFp32, DataType::kBf16}) {
    for (const int32_t num_ranks : {1, 2, 3, 4}) {
      for (const double retention : {1.0, 0.6}) {
        for (const double replicas : {0.0, 0.5}) {
          const uint64_t seed =
              num_ranks * 100 + static_cast<uint64_t>(retention * 10) + static_cast<uint64_t>(replicas * 4);
          const bool exact = seed % 2 == 0;
          CAPTURE(std::string(Name(type)), num_ranks, retention, replicas, exact);
          const MoeProblem problem = RandomProblem(Shape(7, 3, 32, 24, type),
                                                   UnevenTokens(num_ranks, 22, seed), Routing::kSkewed, seed);
          ScriptedPlans plans;
          plans.seed = seed;
          plans.retention = retention;
          plans.replica_probability = replicas;
          plans.router_gradient = exact ? RouterGradient::kExact : RouterGradient::kRetained;
          LayerOutput output;
          RequireOk(RunLayer(problem, {{}, plans, {}}, output));
          RequireKeptAsPlanned(problem, output.kept, plans);
          CompareWithReference(problem, output, exact);
        }
      }
    }
  }
}

TEST_CASE("random shapes, routings and plans equal the reference") {
  // Most of them in fp32, whose tolerance leaves no room: d(alpha) of a few pairs can cancel so well that in
  // bf16 rounding is up to 2 % of what is left, which says nothing.
  constexpr uint64_t kShapes = 600, kInBothTypes = 60;
  for (uint64_t seed = 0; seed < kShapes; ++seed) {
    Random random(seed);
    const auto num_ranks = static_cast<int32_t>(random.Between(1, 4));
    const auto experts = static_cast<int32_t>(random.Between(1, 9));
    // In bf16 very narrow rows cancel so well that rounding is all that is left of a gradient.
    const bool fp32 = random.Below(2) == 0 || seed >= kInBothTypes;
    const DataType type = fp32 ? DataType::kFp32 : DataType::kBf16;
    const int64_t narrowest = type == DataType::kBf16 ? 12 : 1;
    LayerShape shape = Shape(experts, static_cast<int32_t>(random.Between(1, std::min(3, experts))),
                             static_cast<int32_t>(random.Between(narrowest, 40)),
                             static_cast<int32_t>(random.Between(narrowest, 40)), type);
    if (fp32 && seed % 10 == 0) {  // sizes whose weights are packed
      shape.hidden_size = static_cast<int32_t>(64 * random.Between(1, 2));
      shape.intermediate_size = static_cast<int32_t>(64 * random.Between(1, 2));
    }
    shape.gated = random.Below(2) == 0;
    if (!shape.gated && random.Below(2) == 0) shape.activation = Activation::kGelu;
    std::vector<int64_t> tokens;
    for (int32_t r = 0; r < num_ranks; ++r)
      tokens.push_back(random.Below(4) == 0 ? 0 : random.Between(1, 25));
    const auto routing = static_cast<Routing>(random.Below(3));
    const MoeProblem problem = RandomProblem(shape, tokens, routing, seed + 1000);
    ScriptedPlans plans;
    plans.seed = seed;
    plans.retention = random.Below(3) == 0 ? 1.0 : random.Uniform();
    plans.random_quotas = random.Below(2) == 0;
    plans.scatter_backward = random.Below(2) == 0;
    plans.replica_probability = random.Uniform();
    plans.router_gradient = random.Below(2) == 0 ? RouterGradient::kExact : RouterGradient::kRetained;
    RunSetup setup{{}, plans, {}};
    setup.options.recompute_activation = random.Below(3) == 0;
    for (int32_t r = 0; r < num_ranks; ++r) setup.options.nodes.push_back(r / 2);
    CAPTURE(seed, num_ranks, experts, shape.top_k, shape.hidden_size, shape.intermediate_size, shape.gated,
            std::string(Name(shape.dtype)), plans.retention, setup.options.recompute_activation);
    LayerOutput output;
    RequireOk(RunLayer(problem, setup, output));
    RequireKeptAsPlanned(problem, output.kept, plans);
    CompareWithReference(problem, output, plans.router_gradient == RouterGradient::kExact);
  }
}

TEST_CASE("packed weights change nothing but rounding, with replicas, updates and recomputed rows") {
  for (const DataType type : {DataType::kFp32, DataType::kBf16}) {
    for (const int32_t num_ranks : {1, 3}) {
      for (const bool gated : {true, false}) {
        LayerShape shape = Shape(5, 2, 128, 64, type);
        shape.gated = gated;
        const MoeProblem problem = RandomProblem(shape, UnevenTokens(num_ranks, 40, 4), Routing::kSkewed, 4);
        const ScriptedPlans plans{.seed = 4, .replica_probability = 0.6, .retention = 0.8};
        for (const bool pack : {true, false}) {
          CAPTURE(std::string(Name(type)), num_ranks, gated, pack);
          RunSetup setup{{}, plans, {}};
          setup.options.pack_weights = pack;
          setup.options.recompute_activation = gated;
          LayerOutput output;
          RequireOk(RunLayer(problem, setup, output));
          CompareWithReference(problem, output, true);
        }
      }
    }
  }
}

TEST_CASE("edge loads: no tokens on a rank, none at all, idle experts, one expert with everything") {
  const LayerShape shape = Shape(6, 2, 16, 16, DataType::kFp32);
  const std::vector<std::pair<std::vector<int64_t>, Routing>> cases = {
      {{0, 9}, Routing::kUniform}, {{9, 0, 0}, Routing::kSkewed},   {{0, 0}, Routing::kUniform},
      {{1, 0}, Routing::kUniform}, {{20, 13}, Routing::kOneExpert},
  };
  for (const auto& [tokens, routing] : cases) {
    for (const double retention : {1.0, 0.5}) {
      CAPTURE(tokens, retention);
      const MoeProblem problem = RandomProblem(shape, tokens, routing, 5);
      ScriptedPlans plans{.seed = 3, .replica_probability = 0.4, .retention = retention};
      LayerOutput output;
      RequireOk(RunLayer(problem, {{}, plans, {}}, output));
      CompareWithReference(problem, output, true);
    }
  }
}

TEST_CASE("an expert without kept rows keeps an exactly unchanged gradient; quota zero is legal") {
  const MoeProblem problem =
      RandomProblem(Shape(4, 2, 16, 8, DataType::kFp32), {12, 12}, Routing::kUniform, 9);
  const PlanFunction plans = [](const Invocation& invocation, const RoutedCounts& counts) {
    ExecutionPlan execution = ScriptedPlans{.retention = 0.5}(invocation, counts);
    for (InstancePlan& instance : execution.plan.instances)
      if (instance.expert_idx == 2) instance.backward_rows = 0;
    execution.plan.quota[2] = 0;
    return absl::StatusOr<ExecutionPlan>(execution);
  };
  LayerOutput output;
  RequireOk(RunLayer(problem, {{}, plans, {}}, output));
  CompareWithReference(problem, output, true);
  REQUIRE(std::all_of(output.dw1[2].begin(), output.dw1[2].end(), [](float v) { return v == 0.0F; }));
}

TEST_CASE("the dropped set is the same for every number of ranks and placement, and is the exact top K") {
  for (const DataType type : {DataType::kFp32, DataType::kBf16}) {
    for (const Selection selection : {Selection::kLrm, Selection::kGradNorm2, Selection::kGradAbs,
                                      Selection::kRandom, Selection::kLrmSampled}) {
      std::vector<uint8_t> first;
      for (const std::vector<int64_t>& split :
           {std::vector<int64_t>{48}, {24, 24}, {40, 8}, {10, 0, 38}, {12, 12, 12, 12}}) {
        for (const double replicas : {0.0, 0.7}) {
          CAPTURE(std::string(Name(type)), std::string(Name(selection)), split, replicas);
          const MoeProblem problem = RandomProblem(Shape(5, 2, 32, 16, type), split, Routing::kSkewed, 77);
          ScriptedPlans plans{
              .seed = 21, .replica_probability = replicas, .retention = 0.55, .selection = selection};
          LayerOutput output;
          RequireOk(RunLayer(problem, {{}, plans, {}}, output));
          if (first.empty()) first = output.kept;
          REQUIRE(output.kept == first);
          if (selection != Selection::kLrm || type != DataType::kFp32) continue;
          const MoeResult reference = ReferenceLayer(problem, output.kept, true);
          std::vector<int64_t> quota(5, 0);
          for (size_t p = 0; p < output.kept.size(); ++p) quota[problem.expert_idx[p]] += output.kept[p];
          const std::vector<float> score(reference.score.begin(), reference.score.end());
          REQUIRE(output.kept == ReferenceSelection(problem, score, quota));
        }
      }
    }
  }
}

TEST_CASE("ties go to the lowest source, token, slot") {
  MoeProblem problem = RandomProblem(Shape(3, 1, 8, 8, DataType::kFp32), {10, 10, 10}, Routing::kUniform, 4);
  // All tokens alike, so every score of an expert is the same.
  for (int64_t t = 1; t < 30; ++t) {
    std::copy_n(problem.x.begin(), 8, problem.x.begin() + t * 8);
    std::copy_n(problem.dy.begin(), 8, problem.dy.begin() + t * 8);
    problem.alpha[t] = problem.alpha[0];
  }
  for (const double replicas : {0.0, 1.0}) {
    LayerOutput output;
    ScriptedPlans plans{.seed = 8, .replica_probability = replicas, .retention = 0.5};
    RequireOk(RunLayer(problem, {{}, plans, {}}, output));
    std::vector<int64_t> quota(3, 0);
    for (size_t p = 0; p < output.kept.size(); ++p) quota[problem.expert_idx[p]] += output.kept[p];
    REQUIRE(output.kept == ReferenceSelection(problem, std::vector<float>(30, 1.0F), quota));
    CompareWithReference(problem, output, true);
  }
}

TEST_CASE("gradients accumulate over micro-batches, two steps on poisoned buffers, bits repeat") {
  for (const DataType type : {DataType::kFp32, DataType::kBf16}) {
    const MoeProblem problem = RandomProblem(Shape(5, 2, 24, 16, type), {14, 9, 11}, Routing::kSkewed, 31);
    ScriptedPlans plans{.seed = 5, .replica_probability = 0.6, .retention = 0.7};
    // The same plan for every micro-batch and step, so that the reference is one layer times a factor.
    const PlanFunction same = [plans](const Invocation& invocation, const RoutedCounts& counts) {
      ExecutionPlan execution = plans({1, 0, 0}, counts);
      execution.plan.invocation = invocation;
      return absl::StatusOr<ExecutionPlan>(execution);
    };
    const RankScenario scenario = [](RankRun& run) -> absl::Status {
      for (int64_t step = 1; step <= 2; ++step) {
        LRMOE_RETURN_IF_ERROR(run.engine().ZeroGradients());
        // Interleaved as in a pipeline.
        LRMOE_RETURN_IF_ERROR(run.Forward({step, 0, 0}).status());
        LRMOE_RETURN_IF_ERROR(run.Forward({step, 0, 1}).status());
        LRMOE_RETURN_IF_ERROR(run.Backward({step, 0, 0}).status());
        LRMOE_RETURN_IF_ERROR(run.Forward({step, 0, 2}).status());
        LRMOE_RETURN_IF_ERROR(run.Backward({step, 0, 2}).status());
        LRMOE_RETURN_IF_ERROR(run.Backward({step, 0, 1}).status());
        if (run.engine().open_contexts() != 0) return absl::InternalError("contexts left");
      }
      run.ReadGradients(0);
      return absl::OkStatus();
    };
    LayerOutput output, again;
    RequireOk(RunRanks(problem, {{}, same, {}}, output, scenario));
    CompareWithReference(problem, output, true, 3);
    RequireOk(RunRanks(problem, {{}, same, {}}, again, scenario));
    REQUIRE(output == again);
  }
}

TEST_CASE("replicas come and go between micro-batches while contexts need them") {
  const MoeProblem problem =
      RandomProblem(Shape(6, 2, 16, 16, DataType::kFp32), {12, 15, 9}, Routing::kSkewed, 2);
  // Another random placement for every invocation; everything is kept, so that the sum does not depend on the
  // plans.
  ScriptedPlans plans{.seed = 11, .replica_probability = 0.5};
  const RankScenario scenario = [](RankRun& run) -> absl::Status {
    for (int32_t mb = 0; mb < 4; ++mb) LRMOE_RETURN_IF_ERROR(run.Forward({1, 0, mb}).status());
    for (int32_t mb : {1, 3, 0, 2}) LRMOE_RETURN_IF_ERROR(run.Backward({1, 0, mb}).status());
    run.ReadGradients(0);
    return absl::OkStatus();
  };
  LayerOutput output;
  RequireOk(RunRanks(problem, {{}, plans, {}}, output, scenario));
  CompareWithReference(problem, output, true, 4);
}
