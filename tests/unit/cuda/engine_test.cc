// The whole engine on the emulated CUDA device gives what it gives on the CPU device.
#include <catch2/catch.hpp>

#include "tests/support/device/engine_checks.h"
#include "tests/support/emulated_cuda.h"
#include "tests/unit/cuda/emulated_engine.h"
#include "tests/unit/cuda/require_passed.h"
#include "tools/bench/layer_run.h"

namespace lrmoe::testing {
TEST_CASE("a layer on the emulated device equals the CPU's", "[cuda][engine]") {
  const int64_t before = emulator::WorkDone();
  RequirePassed(CheckLayers(Emulated(), {1, 2, 4}));
  CHECK(emulator::WorkDone() > before);
}

TEST_CASE("plain experts and other criteria on the emulated device equal the CPU's", "[cuda][engine]") {
  RequirePassed({CheckCriteria(Emulated())});
}

TEST_CASE("steps with updates on the emulated device equal the CPU's", "[cuda][engine]") {
  RequirePassed({CheckSteps(Emulated())});
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
  run.make_device = emulated.make_device;
  run.make_transports = emulated.make_transports;
  const auto result = bench::RunLayer(run);
  INFO(result.status().ToString());
  REQUIRE(result.ok());
  CHECK(result->arms[0].reports[0][0].kept_rows == 60);
  CHECK(result->arms[1].reports[0][0].kept_rows == 42);
  CHECK(result->arms[1].reports[0][0].backward.score_ms > 0);
}

}  // namespace lrmoe::testing
