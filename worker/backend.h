// What this worker is built with: the CPU always; CUDA and NCCL where the build found them (backend_cuda.cc,
// else backend_cpu.cc).
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/inventory.h"
#include "kernels/kernels.h"
#include "worker/transport/transport.h"

namespace lrmoe {

bool BuiltWithCuda();
bool BuiltWithNccl();

// What this machine has of CUDA. Loads the driver.
kernels::cuda::Inventory LookForDevices();

// Unimplemented without CUDA; else errors of the device.
absl::StatusOr<std::unique_ptr<kernels::Device>> MakeDevice(int32_t ordinal);

// A transport of the same ranks that takes rows from the memory of their devices: NCCL, or copies when there
// is only one rank. Collective. Unimplemented when NCCL is needed and not built.
absl::StatusOr<std::unique_ptr<transport::Transport>> ConnectDevices(
    std::unique_ptr<transport::Transport> control, int32_t ordinal, std::chrono::milliseconds timeout);

}  // namespace lrmoe
