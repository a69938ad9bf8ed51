// The whole engine and every operation on the emulated CUDA device give what they give on the CPU device.
#include <catch2/catch.hpp>
#include <vector>

#include "tests/support/device/device_checks.h"
#include "tests/support/device/engine_checks.h"
#include "tests/support/emulated_cuda.h"
#include "tests/unit/cuda/emulated_engine.h"

namespace lrmoe::testing {
namespace {

void RequirePassed(const std::vector<CheckResult>& results) {
  for (const CheckResult& result : results) {
    CAPTURE(result.name, result.cases, result.worst, result.failure);
    CHECK(result.cases > 0);
    CHECK(result.failure.empty());
  }
}

}  // namespace

TEST_CASE("every operation of the emulated device equals the CPU device's", "[cuda][device]") {
  RequirePassed(CheckDevice(*emulator::MakeEmulatedDevice(), CheckSize::kSmall, 1));
}

TEST_CASE("scores and selection on the emulated device are exact", "[cuda][device]") {
  RequirePassed(CheckSelection(*emulator::MakeEmulatedRuntime(), CheckSize::kSmall, 1));
}

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

TEST_CASE("rows outside the device's memory are refused by name, and end the device", "[cuda][device]") {
  const std::unique_ptr<kernels::Device> device = emulator::MakeEmulatedDevice();
  std::vector<float> host(64), out(1);
  device->RowNorm2(kernels::Type::kFp32, 1, 64, host.data(), out.data());
  const absl::Status status = device->Wait();
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(status.message()), Catch::Contains("RowNorm2: rows outside the memory of emulated"));
  CHECK(device->Wait() == status);
}

}  // namespace lrmoe::testing
