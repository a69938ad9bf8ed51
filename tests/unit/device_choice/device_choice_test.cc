// Which device a rank computes on, from plain facts about machines.
#include "worker/device_choice.h"

#include <catch2/catch.hpp>
#include <cstring>
#include <vector>

namespace lrmoe {
namespace {

using kernels::cuda::Inventory;

Inventory Machine(int devices, int compute_capability = 90) {
  Inventory inventory{.built = true, .driver_version = 13000, .runtime_version = 13000};
  for (int i = 0; i < devices; ++i)
    inventory.devices.push_back({"NVIDIA H200", std::string(15, 'u') + static_cast<char>('0' + i),
                                 compute_capability, int64_t{1} << 37});
  return inventory;
}

struct Outcome {
  absl::StatusOr<int32_t> device;
  std::string reason;
};
Outcome Choose(absl::string_view device, int32_t local_rank, int32_t local_size, const Inventory& inventory) {
  Outcome outcome{absl::UnknownError(""), ""};
  outcome.device = ChooseDevice(device, local_rank, local_size, inventory, &outcome.reason);
  return outcome;
}

void RequireRefused(const Inventory& inventory, absl::StatusCode code, const std::string& why,
                    const std::string& device = "cuda:1") {
  const Outcome named = Choose(device, 0, 1, inventory);
  CHECK(named.device.status().code() == code);
  CHECK_THAT(std::string(named.device.status().message()), Catch::Contains("device is \"" + device + "\"; "));
  CHECK_THAT(std::string(named.device.status().message()), Catch::Contains(why));
}

DeviceClaim Claim(int32_t ordinal, const std::string& node, char uuid) {
  DeviceClaim claim;
  claim.ordinal = ordinal;
  node.copy(claim.node, sizeof(claim.node) - 1);
  if (ordinal != kCpuDevice) std::memset(claim.uuid, uuid, sizeof(claim.uuid));
  return claim;
}

}  // namespace

TEST_CASE("names of devices", "[device]") {
  for (const char* good : {"auto", "cpu", "cuda:0", "cuda:7", "cuda:1023"}) CHECK(CheckDeviceName(good).ok());
  for (const char* bad : {"", "gpu", "cuda", "cuda:", "cuda:-1", "cuda:+1", "cuda: 1", "cuda:1024", "cuda:1x",
                          "cuda:99999999999999999999", "CUDA:0", "cpu:0"}) {
    const absl::Status status = CheckDeviceName(bad);
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(status.message()), Catch::Contains("device is \"" + std::string(bad) +
                                                              "\"; allowed: auto, cpu, cuda:0..cuda:1023"));
  }
}

TEST_CASE("auto takes the device of the local rank, and the CPU with a reason otherwise", "[device]") {
  for (int32_t rank : {0, 1, 2, 3}) CHECK(*Choose("auto", rank, 4, Machine(4)).device == rank);
  CHECK(*Choose("auto", 1, 2, Machine(8)).device == 1);
  const auto on_cpu = [](const Inventory& inventory, int32_t local_size, const std::string& why) {
    for (int32_t rank = 0; rank < local_size; ++rank) {
      const Outcome outcome = Choose("auto", rank, local_size, inventory);
      CHECK(*outcome.device == kCpuDevice);
      CHECK_THAT(outcome.reason, Catch::Contains(why));
    }
  };
  on_cpu({}, 1, "built without CUDA");
  on_cpu(Machine(0), 1, "shows no CUDA device");
  on_cpu(Machine(3), 4, "4 ranks on this host and 3 CUDA devices");
  on_cpu(Machine(2, 75), 2, "sm_75");
  Inventory mixed = Machine(2);
  mixed.devices[1].compute_capability = 70;  // all ranks of the host decide alike
  on_cpu(mixed, 2, "sm_70");
  Inventory no_driver = Machine(0);
  no_driver.driver_version = 0;
  on_cpu(no_driver, 2, "no NVIDIA driver");
  CHECK(*Choose("cpu", 0, 1, Machine(4)).device == kCpuDevice);
}

TEST_CASE("a named device is had or refused with the reason", "[device]") {
  CHECK(*Choose("cuda:3", 0, 1, Machine(4)).device == 3);
  RequireRefused({}, absl::StatusCode::kUnimplemented, "built without CUDA");
  Inventory inventory = Machine(4);
  inventory.driver_version = 0;
  RequireRefused(inventory, absl::StatusCode::kFailedPrecondition, "no NVIDIA driver");
  inventory.driver_version = 12080;
  RequireRefused(inventory, absl::StatusCode::kFailedPrecondition,
                 "the driver supports CUDA 12.8 at most; this worker is built with CUDA 13.0");
  inventory.driver_version = 13010;
  inventory.error = "cudaErrorSystemNotReady";
  RequireRefused(inventory, absl::StatusCode::kFailedPrecondition, "cudaErrorSystemNotReady");
  RequireRefused(Machine(0), absl::StatusCode::kNotFound, "shows no CUDA device");
  RequireRefused(Machine(4), absl::StatusCode::kNotFound, "shows 4 CUDA devices; allowed: cuda:0..cuda:3",
                 "cuda:4");
  RequireRefused(Machine(2, 75), absl::StatusCode::kFailedPrecondition, "is sm_75; allowed: sm_80 and newer");
}

TEST_CASE("ranks may not share a device, nor mix kinds", "[device]") {
  const std::vector<DeviceClaim> good{Claim(0, "a", 'x'), Claim(1, "a", 'y'), Claim(0, "b", 'z')};
  CHECK(CheckClaims(good).ok());
  CHECK(CheckClaims(std::vector<DeviceClaim>{Claim(kCpuDevice, "a", 0), Claim(kCpuDevice, "a", 0)}).ok());
  std::vector<DeviceClaim> shared = good;
  shared[1] = Claim(1, "a", 'x');  // another ordinal, the same device
  absl::Status status = CheckClaims(shared);
  CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(std::string(status.message()),
             Catch::Contains("rank 0 (a) uses cuda:0, rank 1 (a) uses cuda:1: the same device"));
  std::vector<DeviceClaim> mixed = good;
  mixed[2] = Claim(kCpuDevice, "b", 0);
  status = CheckClaims(mixed);
  CHECK(status.code() == absl::StatusCode::kFailedPrecondition);
  CHECK_THAT(
      std::string(status.message()),
      Catch::Contains("rank 0 (a) uses cuda:0, rank 2 (b) uses the CPU; all ranks must use the same kind"));
}

}  // namespace lrmoe
