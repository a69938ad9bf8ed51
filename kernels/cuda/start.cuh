// Starting a kernel on either target, and choosing its template arguments from run-time values.
#pragma once

#include "absl/strings/str_cat.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/passes.h"
#include "kernels/cuda/target.cuh"

namespace lrmoe::kernels::cuda {

template <typename... Parameters, typename... Arguments>
absl::Status Start(Stream stream, const LaunchShape& shape, void (*kernel)(Parameters...),
                   Arguments... arguments) {
  if (shape.blocks == 0) return absl::OkStatus();
#if defined(__CUDACC__)
  kernel<<<shape.blocks, shape.threads, shape.shared_bytes, static_cast<cudaStream_t>(stream)>>>(
      arguments...);
  const cudaError_t error = cudaGetLastError();
  if (error != cudaSuccess)
    return absl::InternalError(absl::StrCat("kernel launch: ", cudaGetErrorName(error)));
#else
  ::lrmoe::emulator::Launch(stream, shape.blocks, shape.threads, shape.shared_bytes,
                            [=] { kernel(arguments...); });
#endif
  return absl::OkStatus();
}

inline absl::Status CheckSize(const char* name, int64_t value) {
  if (value >= 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(name, " is ", value, "; allowed: >= 0"));
}

// Whether every row of `width` elements of T that starts at `base` is a whole number of aligned 16-byte
// packs.
template <typename T>
bool Packed(int64_t width, std::initializer_list<const void*> bases) {
  if (width * static_cast<int64_t>(sizeof(T)) % 16 != 0) return false;
  for (const void* base : bases)
    if (reinterpret_cast<uintptr_t>(base) % 16 != 0) return false;
  return true;
}

}  // namespace lrmoe::kernels::cuda
