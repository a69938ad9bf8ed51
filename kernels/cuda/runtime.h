// What the CUDA device needs of CUDA besides kernels and GEMMs: memory, copies, one stream. Behind an
// interface so that the device itself also runs on a machine without a GPU, over the tests' emulation.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/cuda/passes.h"
#include "kernels/interprocess.h"
#include "kernels/kernels.h"
#include "kernels/memory.h"

namespace lrmoe::kernels::cuda {

enum class Direction : uint8_t { kToDevice, kToHost, kWithin };

// Threads: one at a time, whichever it is. Errors: Internal with CUDA's name of the error; ResourceExhausted
// when memory is short; of Synchronize also DeadlineExceeded when an awaited event of another process did not
// fire.
class Runtime {
 public:
  virtual ~Runtime() = default;

  // "NVIDIA H200 (cuda:0, sm_90)"
  virtual absl::string_view name() const = 0;
  // Everything is enqueued on this one.
  virtual Stream stream() const = 0;
  virtual int64_t memory_bytes() const = 0;
  // Memory of its own, or opened by interprocess().
  virtual bool Holds(const void* pointer) const = 0;
  virtual absl::StatusOr<std::unique_ptr<Memory>> Reserve(int64_t bytes) = 0;
  // Host memory that the device copies without a detour; all of it usable at once.
  virtual absl::StatusOr<std::unique_ptr<Memory>> AllocatePinned(int64_t bytes) = 0;
  virtual absl::Status Copy(void* dst, const void* src, int64_t bytes, Direction direction) = 0;
  virtual absl::Status Fill(void* dst, uint8_t value, int64_t bytes) = 0;
  // Calls `enqueue`, which launches kernels or GEMMs on stream(), with this device current in the thread.
  virtual absl::Status Launch(absl::FunctionRef<absl::Status()> enqueue) = 0;
  virtual absl::Status Synchronize() = 0;
  virtual Interprocess& interprocess() = 0;
};

// Grouped GEMM on a stream; see Device::GroupedGemm. Empty groups do not reach it.
class GemmBackend {
 public:
  virtual ~GemmBackend() = default;
  virtual absl::string_view path() const = 0;
  virtual absl::Status Run(Stream stream, GemmKind kind, Type type, int64_t n, int64_t k,
                           std::span<const GemmGroup> groups) = 0;
};

}  // namespace lrmoe::kernels::cuda
