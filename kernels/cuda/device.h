// The CUDA device: the passes of passes.h and pair_passes.h and a GEMM backend on one stream, with what the
// host describes and takes staged through pinned memory.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "kernels/cuda/gemm_shape.h"
#include "kernels/cuda/inventory.h"
#include "kernels/cuda/runtime.h"
#include "kernels/kernels.h"

namespace lrmoe::kernels::cuda {

// A device over given parts: CUDA's, or emulated ones.
std::unique_ptr<Device> MakeCudaDevice(std::unique_ptr<Runtime> runtime, std::unique_ptr<GemmBackend> gemm);

// What a build without CUDA does not have (cuda_runtime.cc, cublas_gemm.cc).
Inventory TakeInventory();
// A copy between host and device memory, either way, of any device this process uses; complete when it
// returns.
absl::Status CopyBetweenPlaces(void* to, const void* from, int64_t bytes);
// For the device that is current in the calling thread.
absl::StatusOr<std::unique_ptr<GemmBackend>> CreateCublasGemm(GemmPathRule rule);
// The device with this ordinal among those CUDA shows. NotFound, FailedPrecondition, ResourceExhausted with
// CUDA's name of the error.
absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int32_t ordinal,
                                                         GemmPathRule rule = GemmPathRule::kByTable);

}  // namespace lrmoe::kernels::cuda
