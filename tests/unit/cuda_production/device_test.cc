// The CUDA device as it is built for production, over fakes of CUDA and cuBLAS, against the CPU device.
#include <catch2/catch.hpp>
#include <memory>
#include <string>
#include <vector>

#include "kernels/cuda/device.h"
#include "tests/support/device/engine_checks.h"
#include "tests/unit/cuda/require_passed.h"
#include "tests/unit/cuda_production/fresh.h"
#include "worker/transport/inproc.h"

namespace lrmoe::fake_cuda {
namespace {

using kernels::cuda::GemmPathRule;
using testing::CheckSize;

// Several logical ranks on one device.
testing::EngineDevice Loopback(GemmPathRule rule) {
  return {.make_device = [rule](int32_t) { return kernels::cuda::CreateCudaDevice(1, rule); },
          .make_transports =
              [](int32_t num_ranks) {
                return transport::CreateInprocGroup(num_ranks, kernels::cuda::CopyBetweenPlaces);
              }};
}

}  // namespace

TEST_CASE("every operation of the CUDA device equals the CPU device's, whichever way GEMMs go",
          "[cuda][device]") {
  const FreshMachine fresh;
  for (const GemmPathRule rule : {GemmPathRule::kStreams, GemmPathRule::kGrouped, GemmPathRule::kByTable}) {
    const Gemms before = CountGemms();
    auto device = kernels::cuda::CreateCudaDevice(1, rule);
    REQUIRE(device.status() == absl::OkStatus());
    testing::RequirePassed(testing::CheckDevice(**device, CheckSize::kSmall, 1));
    CHECK((CountGemms().grouped > before.grouped) == (rule == GemmPathRule::kGrouped));
    CHECK(CountGemms().single > before.single);
  }
  CHECK(CountGemms().without_workspace == 0);
}

TEST_CASE("pair operations of the CUDA device equal the host's", "[cuda][device]") {
  const FreshMachine fresh;
  auto device = kernels::cuda::CreateCudaDevice(0);
  REQUIRE(device.status() == absl::OkStatus());
  testing::RequirePassed(testing::CheckPairs(**device, CheckSize::kSmall, 1));
}

TEST_CASE("a layer on CUDA devices equals the CPU's", "[cuda][engine]") {
  const FreshMachine fresh;
  testing::RequirePassed(testing::CheckLayers(Loopback(GemmPathRule::kByTable), {1, 4}));
  testing::RequirePassed(testing::CheckLayers(Loopback(GemmPathRule::kGrouped), {2}));
}

TEST_CASE("plain experts and other criteria on CUDA devices equal the CPU's", "[cuda][engine]") {
  const FreshMachine fresh;
  testing::RequirePassed({testing::CheckCriteria(Loopback(GemmPathRule::kByTable))});
}

TEST_CASE("steps with updates on CUDA devices equal the CPU's", "[cuda][engine]") {
  const FreshMachine fresh;
  testing::RequirePassed({testing::CheckSteps(Loopback(GemmPathRule::kByTable))});
}

}  // namespace lrmoe::fake_cuda
