// The whole engine on the emulated CUDA device gives what it gives on the CPU device.
#include <catch2/catch.hpp>

#include "tests/support/device/engine_checks.h"
#include "tests/support/emulated_cuda.h"
#include "tests/unit/cuda/emulated_engine.h"
#include "tests/unit/cuda/require_passed.h"

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

}  // namespace lrmoe::testing
