// The whole engine on the emulated CUDA device gives what it gives on the CPU device.
#include <catch2/catch.hpp>
#include <cmath>
#include <vector>

#include "common/random.h"
#include "common/status_macros.h"
#include "tests/support/emulated_cuda.h"
#include "tests/support/engine/engine_runs.h"
#include "worker/transport/inproc.h"

namespace lrmoe::testing {
namespace {

LayerShape Shape(DataType type, bool gated = true, Activation activation = Activation::kSilu) {
  LayerShape shape;
  shape.num_experts = 6;
  shape.top_k = 2;
  shape.hidden_size = 24;
  shape.intermediate_size = 20;
  shape.dtype = type;
  shape.gated = gated;
  shape.activation = activation;
  return shape;
}

RunSetup OnEmulatedDevice(RunSetup setup) {
  setup.make_device = [] { return emulator::MakeEmulatedDevice(); };
  setup.make_transports = [](int32_t num_ranks) {
    return transport::CreateInprocGroup(num_ranks, [](std::byte* to, const std::byte* from, int64_t bytes) {
      emulator::CopyAnywhere(to, from, bytes);
      return absl::OkStatus();
    });
  };
  return setup;
}

void RequireOk(const std::vector<absl::Status>& statuses) {
  for (const absl::Status& status : statuses) {
    INFO(status.ToString());
    REQUIRE(status.ok());
  }
}

// Both compute in fp32 with sums of another order; bf16 may round the other way.
bool Close(const std::vector<float>& got, const std::vector<float>& want, DataType type) {
  if (got.size() != want.size()) return false;
  double difference = 0, magnitude = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    if (!std::isfinite(got[i])) return false;
    difference += std::pow(double{got[i]} - want[i], 2);
    magnitude += std::pow(double{want[i]}, 2);
  }
  return std::sqrt(difference) <= (type == DataType::kFp32 ? 1e-5 : 1e-2) * std::sqrt(magnitude) + 1e-12;
}

void RequireSame(const LayerOutput& got, const LayerOutput& want, DataType type) {
  REQUIRE(got.kept == want.kept);
  CHECK(Close(got.y, want.y, type));
  CHECK(Close(got.dx, want.dx, type));
  CHECK(Close(got.dalpha, want.dalpha, type));
  for (size_t e = 0; e < want.dw1.size(); ++e) {
    CHECK(Close(got.dw1[e], want.dw1[e], type));
    CHECK(Close(got.dw2[e], want.dw2[e], type));
  }
}

struct Case {
  DataType type;
  std::vector<int64_t> tokens;
  double retention, replicas;
  bool recompute;
};

}  // namespace

TEST_CASE("a layer on the emulated device equals the CPU's: types, ranks, retention, replicas, recompute",
          "[cuda][engine]") {
  uint64_t seed = 1;
  for (const DataType type : {DataType::kFp32, DataType::kBf16})
    for (const auto& tokens : {std::vector<int64_t>{25}, {13, 9}, {7, 0, 12, 5}})
      for (const auto& [retention, replicas] : {std::pair{1.0, 0.0}, {0.6, 0.0}, {0.6, 0.5}}) {
        const Case c{type, tokens, retention, replicas, seed % 3 == 0};
        CAPTURE(std::string(Name(c.type)), c.tokens, c.retention, c.replicas, c.recompute, seed);
        const MoeProblem problem = RandomProblem(Shape(c.type), c.tokens, Routing::kSkewed, seed);
        ScriptedPlans plans{.seed = seed, .replica_probability = c.replicas, .retention = c.retention};
        plans.router_gradient = seed % 2 == 0 ? RouterGradient::kExact : RouterGradient::kRetained;
        RunSetup setup{{}, plans, {}};
        setup.options.recompute_activation = c.recompute;
        ++seed;
        LayerOutput want, got;
        RequireOk(RunLayer(problem, setup, want));
        const int64_t before = emulator::WorkDone();
        RequireOk(RunLayer(problem, OnEmulatedDevice(setup), got));
        CHECK(emulator::WorkDone() > before);
        RequireSame(got, want, c.type);
      }
}

TEST_CASE("plain experts and other criteria on the emulated device equal the CPU's", "[cuda][engine]") {
  for (const Activation activation : {Activation::kSilu, Activation::kGelu})
    for (const Selection selection : {Selection::kGradNorm2, Selection::kGradAbs, Selection::kRandom}) {
      const MoeProblem problem =
          RandomProblem(Shape(DataType::kFp32, false, activation), {11, 8}, Routing::kSkewed, 5);
      ScriptedPlans plans{.seed = 5, .retention = 0.5};
      plans.selection = selection;
      LayerOutput want, got;
      RequireOk(RunLayer(problem, {{}, plans, {}}, want));
      RequireOk(RunLayer(problem, OnEmulatedDevice({{}, plans, {}}), got));
      RequireSame(got, want, DataType::kFp32);
    }
}

TEST_CASE("steps with updates, evaluation and gradient norms on the emulated device equal the CPU's",
          "[cuda][engine]") {
  const MoeProblem problem = RandomProblem(Shape(DataType::kBf16), {9, 14}, Routing::kSkewed, 7);
  ScriptedPlans plans{.seed = 7, .replica_probability = 0.5, .retention = 0.7};
  std::vector<double> norms[2];
  LayerOutput outputs[2];
  for (const int emulated : {0, 1}) {
    RunSetup setup{{}, plans, {}};
    if (emulated == 1) setup = OnEmulatedDevice(std::move(setup));
    std::vector<double>& norm = norms[emulated];
    RequireOk(RunRanks(problem, setup, outputs[emulated], [&](RankRun& run) -> absl::Status {
      for (int64_t step = 1; step <= 2; ++step) {
        for (int32_t micro_batch = 0; micro_batch < 2; ++micro_batch) {
          LRMOE_RETURN_IF_ERROR(run.Forward({step, 0, micro_batch}).status());
          LRMOE_RETURN_IF_ERROR(run.Backward({step, 0, micro_batch}).status());
        }
        LRMOE_ASSIGN_OR_RETURN(const double squared, run.engine().SquaredGradientNorm());
        if (run.rank() == 0) norm.push_back(squared);
        run.ReadGradients(0);
        engine::AdamWStep update;
        update.step = step;
        LRMOE_RETURN_IF_ERROR(run.engine().OptimizerStep(update));
        LRMOE_RETURN_IF_ERROR(run.engine().ZeroGradients());
      }
      return run.Forward({3, 0, 0}, false).status();
    }));
  }
  REQUIRE(norms[0].size() == 2);
  for (int step : {0, 1}) CHECK(norms[1][step] == Approx(norms[0][step]).epsilon(1e-2));
  RequireSame(outputs[1], outputs[0], DataType::kBf16);
}

}  // namespace lrmoe::testing
