// Errors of CUDA's two libraries as statuses. Nothing links libcuda, which only machines with a GPU have: its
// functions are found at run time.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace lrmoe::kernels::cuda {

inline absl::Status ToStatus(cudaError_t error, absl::string_view what) {
  if (error == cudaSuccess) return absl::OkStatus();
  (void)cudaGetLastError();  // else this thread's next launch would report it
  const std::string message =
      absl::StrCat(what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error));
  return error == cudaErrorMemoryAllocation ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

inline absl::Status ToStatus(CUresult result, absl::string_view what) {
  if (result == CUDA_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": CUDA driver error ", static_cast<int>(result));
  return result == CUDA_ERROR_OUT_OF_MEMORY ? absl::ResourceExhaustedError(message)
                                            : absl::InternalError(message);
}

#define LRMOE_CUDA_RETURN_IF_ERROR(call)                                                           \
  do {                                                                                             \
    if (absl::Status cuda_status = ToStatus((call), #call); !cuda_status.ok()) return cuda_status; \
  } while (false)

// FailedPrecondition when the driver is older than the function.
template <typename Function>
absl::Status FindDriverFunction(const char* symbol, Function* function) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  LRMOE_CUDA_RETURN_IF_ERROR(
      cudaGetDriverEntryPointByVersion(symbol, &found, 12000, cudaEnableDefault, &result));
  if (result != cudaDriverEntryPointSuccess || found == nullptr)
    return absl::FailedPreconditionError(absl::StrCat("the driver has no ", symbol));
  *function = reinterpret_cast<Function>(found);
  return absl::OkStatus();
}

}  // namespace lrmoe::kernels::cuda
