// Which device a worker computes on: from the setting, the local rank and what the machine has. Pure; looking
// at the machine and telling the other ranks is place.cc's.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/inventory.h"

namespace lrmoe {

inline constexpr int32_t kCpuDevice = -1;

// "auto", "cpu" or "cuda:N", N in 0..1023. InvalidArgument otherwise.
absl::Status CheckDeviceName(absl::string_view device);

// The ordinal of a CUDA device, or kCpuDevice. "auto": the device with the number of the local rank, where
// there is one for each rank of this host that this program can use; otherwise the CPU, and `reason` says
// why. "cuda:N": that one, or an error: Unimplemented without CUDA in this build; FailedPrecondition without
// a driver, or with one that is too old for this build; NotFound for a device that is not there;
// FailedPrecondition for one that is too old.
absl::StatusOr<int32_t> ChooseDevice(absl::string_view device, int32_t local_rank, int32_t local_size,
                                     const kernels::cuda::Inventory& inventory, std::string* reason);

// What each rank tells the others about its choice. Plain bytes.
struct DeviceClaim {
  int32_t ordinal = kCpuDevice;
  char node[64] = {};
  char uuid[16] = {};  // zeros on the CPU
};
// FailedPrecondition when ranks mix CPU and CUDA, or two ranks have one device: NCCL cannot, and their memory
// budgets would be counted twice. The same words on every rank.
absl::Status CheckClaims(std::span<const DeviceClaim> claims);

}  // namespace lrmoe
