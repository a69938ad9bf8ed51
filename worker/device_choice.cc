#include "worker/device_choice.h"

#include <cstring>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace lrmoe {
namespace {

using kernels::cuda::Inventory;

constexpr int kOldestComputeCapability = 80;  // A100; kernels are compiled for nothing older
constexpr int32_t kHighestOrdinal = 1023;

// "13.0" for 13000.
std::string CudaVersion(int version) {
  return absl::StrCat(version / 1000, ".", version % 1000 / 10);
}

// Whether this program can use CUDA here at all.
absl::Status CheckCuda(const Inventory& inventory) {
  if (!inventory.built)
    return absl::UnimplementedError("this worker is built without CUDA; allowed: auto, cpu");
  if (inventory.driver_version == 0)
    return absl::FailedPreconditionError("this machine has no NVIDIA driver; allowed: auto, cpu");
  // A driver runs every program of its own major version and older ones.
  if (inventory.driver_version / 1000 < inventory.runtime_version / 1000)
    return absl::FailedPreconditionError(
        absl::StrCat("the driver supports CUDA ", CudaVersion(inventory.driver_version),
                     " at most; this worker is built with CUDA ", CudaVersion(inventory.runtime_version)));
  if (!inventory.error.empty())
    return absl::FailedPreconditionError(absl::StrCat("the devices cannot be listed: ", inventory.error));
  return absl::OkStatus();
}

absl::Status CheckOrdinal(int32_t ordinal, const Inventory& inventory) {
  const auto count = static_cast<int32_t>(inventory.devices.size());
  if (count == 0) return absl::NotFoundError("this machine shows no CUDA device; allowed: auto, cpu");
  if (ordinal >= count)
    return absl::NotFoundError(
        absl::StrCat("this machine shows ", count, " CUDA devices; allowed: cuda:0..cuda:", count - 1));
  const int capability = inventory.devices[ordinal].compute_capability;
  if (capability < kOldestComputeCapability)
    return absl::FailedPreconditionError(absl::StrCat(inventory.devices[ordinal].name, " is sm_", capability,
                                                      "; allowed: sm_", kOldestComputeCapability,
                                                      " and newer"));
  return absl::OkStatus();
}

bool ParseOrdinal(absl::string_view device, int32_t* ordinal) {
  if (!absl::StartsWith(device, "cuda:")) return false;
  const absl::string_view digits = device.substr(5);
  if (digits.empty() || digits.find_first_not_of("0123456789") != absl::string_view::npos) return false;
  return absl::SimpleAtoi(digits, ordinal) && *ordinal <= kHighestOrdinal;
}

std::string Claimed(const DeviceClaim& claim, size_t rank) {
  return absl::StrCat("rank ", rank, " (", claim.node, ") uses ",
                      claim.ordinal == kCpuDevice ? "the CPU" : absl::StrCat("cuda:", claim.ordinal));
}

}  // namespace

absl::Status CheckDeviceName(absl::string_view device) {
  int32_t ordinal = 0;
  if (device == "auto" || device == "cpu" || ParseOrdinal(device, &ordinal)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("device is \"", device, "\"; allowed: auto, cpu, cuda:0..cuda:", kHighestOrdinal));
}

absl::StatusOr<int32_t> ChooseDevice(absl::string_view device, int32_t local_rank, int32_t local_size,
                                     const Inventory& inventory, std::string* reason) {
  if (absl::Status status = CheckDeviceName(device); !status.ok()) return status;
  if (device == "cpu") {
    *reason = "device is \"cpu\"";
    return kCpuDevice;
  }
  absl::Status status = CheckCuda(inventory);
  if (device == "auto") {
    if (status.ok()) status = CheckOrdinal(0, inventory);
    const auto count = static_cast<int32_t>(inventory.devices.size());
    if (status.ok() && count < local_size)
      status = absl::FailedPreconditionError(absl::StrCat(local_size, " ranks on this host and ", count,
                                                          " CUDA devices; each rank needs its own"));
    for (int32_t i = 0; i < local_size && status.ok(); ++i) status = CheckOrdinal(i, inventory);
    *reason = status.ok() ? absl::StrCat("local rank ", local_rank) : std::string(status.message());
    return status.ok() ? local_rank : kCpuDevice;
  }
  int32_t ordinal = 0;
  ParseOrdinal(device, &ordinal);
  if (status.ok()) status = CheckOrdinal(ordinal, inventory);
  if (!status.ok())
    return absl::Status(status.code(), absl::StrCat("device is \"", device, "\"; ", status.message()));
  *reason = absl::StrCat("device is \"", device, "\"");
  return ordinal;
}

absl::Status CheckClaims(std::span<const DeviceClaim> claims) {
  for (size_t b = 0; b < claims.size(); ++b) {
    if ((claims[b].ordinal == kCpuDevice) != (claims[0].ordinal == kCpuDevice))
      return absl::FailedPreconditionError(absl::StrCat(Claimed(claims[0], 0), ", ", Claimed(claims[b], b),
                                                        "; all ranks must use the same kind"));
    if (claims[b].ordinal == kCpuDevice) continue;
    for (size_t a = 0; a < b; ++a)
      if (std::memcmp(claims[a].uuid, claims[b].uuid, sizeof(claims[a].uuid)) == 0)
        return absl::FailedPreconditionError(absl::StrCat(Claimed(claims[a], a), ", ", Claimed(claims[b], b),
                                                          ": the same device; each rank needs its own"));
  }
  return absl::OkStatus();
}

}  // namespace lrmoe
