// The whole engine on the emulated CUDA device gives what it gives on the CPU device.
#include <catch2/catch.hpp>

#include "tests/support/device/engine_checks.h"
#include "tests/support/emulated_cuda.h"
#include "tests/support/engine/engine_runs.h"
#include "tests/unit/cuda/emulated_engine.h"
#include "tests/unit/cuda/require_passed.h"
#include "tools/bench/layer_run.h"
#include "worker/transport/faulty.h"

namespace lrmoe::testing {
TEST_CASE("a layer on the emulated device equals the CPU's", "[cuda][engine]") {
  const int64_t before = emulator::WorkDone();
  RequirePassed(CheckLayers(Emulated(), {1, 2, 4}));
  CHECK(emulator::WorkDone() > before);
}

TEST_CASE("plain experts and other criteria on the emulated device equal the CPU's", "[cuda][engine]") {
  RequirePassed({CheckCriteria(Emulated())});
}

TEST_CASE("random layers on the emulated device equal the CPU's", "[cuda][engine]") {
  RequirePassed({CheckRandomLayers(Emulated(), 25, 1)});
}

TEST_CASE("steps with updates on the emulated device equal the CPU's", "[cuda][engine]") {
  RequirePassed({CheckSteps(Emulated())});
}

TEST_CASE("an epoch that ends at any operation leaves nothing of a pass under way on its devices",
          "[cuda][engine]") {
  const MoeProblem problem = RandomProblem(SmallShape(), {9, 7}, Routing::kUniform, 12);
  const EngineDevice emulated = Emulated();
  int64_t operation = 0;
  for (bool ended = true; ended; ++operation) {
    CAPTURE(operation);
    RunSetup setup{{}, ScriptedPlans{.seed = 2, .replica_probability = 0.5, .retention = 0.6}, {}};
    setup.options.overlap = operation % 2 == 0;
    setup.make_device = emulated.make_device;
    setup.make_transports = emulated.make_transports;
    setup.wrap = [&](int32_t rank, std::unique_ptr<transport::Transport> inner) {
      transport::FaultPlan faults;
      faults.abort_probability = rank == 1 ? 1.0 : 0.0;
      faults.first_operation = operation;
      return transport::CreateFaulty(std::move(inner), faults);
    };
    LayerOutput output;
    ended = false;
    for (const absl::Status& status : RunLayer(problem, setup, output)) {
      INFO(status.ToString());
      REQUIRE((status.ok() || absl::IsUnavailable(status)));
      ended = ended || !status.ok();
    }
  }
  CHECK(operation > 15);
}

TEST_CASE("the bench's layer runs with its rows in the memory of the emulated device", "[cuda][engine]") {
  bench::LayerRun run;
  run.shape.num_experts = 4;
  run.shape.top_k = 2;
  run.shape.hidden_size = 16;
  run.shape.intermediate_size = 8;
  run.num_tokens = 30;
  run.steps = 1;
  run.arms = {{"lrmoe", 1.0}, {"lrmoe", 0.7}};
  run.rows_on_device = run.wait_between_phases = true;
  const EngineDevice emulated = Emulated();
  run.make_device = [&emulated] { return emulated.make_device(0); };
  run.make_transports = emulated.make_transports;
  const auto result = bench::RunLayer(run);
  INFO(result.status().ToString());
  REQUIRE(result.ok());
  CHECK(result->arms[0].reports[0][0].kept_rows == 60);
  CHECK(result->arms[1].reports[0][0].kept_rows == 42);
  CHECK(result->arms[1].reports[0][0].backward.score_ms > 0);
}

}  // namespace lrmoe::testing
