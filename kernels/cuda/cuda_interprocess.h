// Sharing over CUDA IPC: cudaMalloc'ed allocations and interprocess events of one device. Virtual memory
// (PyTorch's expandable segments) has no such handles.
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <chrono>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "kernels/interprocess.h"

namespace lrmoe::kernels::cuda {

class CudaInterprocess final : public Interprocess {
 public:
  // For the work of `stream` on the device with this ordinal, both of which outlive it.
  static absl::StatusOr<std::unique_ptr<CudaInterprocess>> Create(int32_t ordinal, cudaStream_t stream);

  const std::string& uuid() const override { return uuid_; }
  absl::StatusOr<std::unique_ptr<Memory>> OpenMemory(absl::string_view handle, int64_t bytes) override;
  absl::StatusOr<std::unique_ptr<SharedEvent>> OpenEvent(absl::string_view handle) override;
  absl::StatusOr<std::unique_ptr<SharedEvent>> MakeEvent() override;

  bool Holds(const void* pointer) const;
  // Polls until the events that the stream waits for have fired, so that no later wait for the stream is
  // without a limit. DeadlineExceeded as SharedEvent::Await says, then and ever after.
  absl::Status WaitForEvents();

 private:
  class OpenedMemory;
  class OwnedEvent;
  class Event;
  struct Awaited {
    std::shared_ptr<const OwnedEvent> event;  // not to be forgotten while the stream waits, whoever is gone
    std::chrono::steady_clock::time_point until;
    std::chrono::milliseconds limit;
  };

  CudaInterprocess(int32_t ordinal, cudaStream_t stream) : ordinal_(ordinal), stream_(stream) {}
  absl::Status MakeCurrent() const;

  const int32_t ordinal_;
  cudaStream_t stream_;
  std::string uuid_;
  PFN_cuMemGetAddressRange_v3020 address_range_ = nullptr;
  std::vector<const OpenedMemory*> opened_;
  std::vector<Awaited> awaited_;
};

}  // namespace lrmoe::kernels::cuda
