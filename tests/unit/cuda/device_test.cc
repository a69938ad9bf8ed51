// Every operation of the emulated CUDA device gives what it gives on the CPU device.
#include <catch2/catch.hpp>
#include <memory>
#include <vector>

#include "tests/support/emulated_cuda.h"
#include "tests/unit/cuda/require_passed.h"

namespace lrmoe::testing {

TEST_CASE("every operation of the emulated device equals the CPU device's", "[cuda][device]") {
  RequirePassed(CheckDevice(*emulator::MakeEmulatedDevice(), CheckSize::kSmall, 1));
}

TEST_CASE("pair operations of the emulated device equal the host's", "[cuda][device]") {
  RequirePassed(CheckPairs(*emulator::MakeEmulatedDevice(), CheckSize::kSmall, 1));
}

TEST_CASE("memory outside the device's is refused by name, and ends the device", "[cuda][device]") {
  const std::unique_ptr<kernels::Device> device = emulator::MakeEmulatedDevice();
  std::vector<float> host(64), out(1);
  device->RowNorm2(kernels::Type::kFp32, 1, 64, host.data(), out.data());
  const absl::Status status = device->Wait();
  CHECK(status.code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(status.message()), Catch::Contains("RowNorm2: memory outside that of emulated"));
  device->Invert(1, nullptr, nullptr);  // nothing is enqueued any more
  CHECK(device->Wait() == status);
}

TEST_CASE("results for the host are there after the wait, and not before", "[cuda][device]") {
  const std::unique_ptr<kernels::Device> device = emulator::MakeEmulatedDevice();
  auto memory = std::move(device->Reserve(40)).value();
  REQUIRE(memory->Commit(40).ok());
  auto* const values = reinterpret_cast<int32_t*>(memory->base());
  std::vector<kernels::Stretch> stretches{{5, 0, 10}};
  device->CountStretches(stretches, values);
  stretches.front() = {0, 0, 1000};  // read before the call returned
  std::vector<int32_t> largest{-7};
  device->MaxOfRanges(std::vector<kernels::Range>{{0, 10}}, values, largest);
  CHECK(largest[0] == -7);
  REQUIRE(device->Wait() == absl::OkStatus());
  CHECK(largest[0] == 14);
}

}  // namespace lrmoe::testing
