// Small values on their way between host and device: pinned host memory mirrored in device memory, taken
// piece by piece and all given back at once when the stream is done.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/runtime.h"

namespace lrmoe::kernels::cuda {

class Staging {
 public:
  // `runtime` outlives it.
  explicit Staging(Runtime* runtime) : runtime_(runtime) {}

  // A copy of `bytes` bytes at `src` in device memory, valid for what is enqueued before Finish; `src` is
  // read before the call returns.
  absl::StatusOr<const void*> In(const void* src, int64_t bytes);
  // Device memory for `bytes` bytes that nobody wrote yet, valid for what is enqueued before Finish.
  absl::StatusOr<void*> Scratch(int64_t bytes);
  // Enqueues the way of `bytes` bytes at `device`, of Scratch, to `dst`, where they are after Finish.
  absl::Status Out(void* dst, const void* device, int64_t bytes);
  // The stream is done: delivers and takes everything back.
  void Finish();

  // In use now; when this passes a limit the device waits for the stream.
  int64_t bytes_in_use() const { return in_use_; }

 private:
  struct Chunk {
    std::unique_ptr<Memory> host, device;
    int64_t used = 0;
  };
  struct Piece {
    std::byte* host;
    std::byte* device;
  };
  struct Delivery {
    void* dst;
    const std::byte* host;
    int64_t bytes;
  };
  absl::StatusOr<Piece> Take(int64_t bytes);

  Runtime* const runtime_;
  std::vector<Chunk> chunks_;  // kept: a step that needs no more than an earlier one allocates nothing
  size_t current_ = 0;         // those before are full
  int64_t in_use_ = 0;
  std::vector<Delivery> deliveries_;
};

}  // namespace lrmoe::kernels::cuda
