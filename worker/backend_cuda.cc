#include <utility>

#include "kernels/cuda/device.h"
#include "worker/backend.h"
#include "worker/transport/inproc.h"
#if LRMOE_NCCL
#include "worker/transport/nccl.h"
#endif

namespace lrmoe {

bool BuiltWithCuda() {
  return true;
}
bool BuiltWithNccl() {
  return LRMOE_NCCL;
}

kernels::cuda::Inventory LookForDevices() {
  return kernels::cuda::TakeInventory();
}

absl::StatusOr<std::unique_ptr<kernels::Device>> MakeDevice(int32_t ordinal) {
  return kernels::cuda::CreateCudaDevice(ordinal);
}

absl::StatusOr<std::unique_ptr<transport::Transport>> ConnectDevices(
    std::unique_ptr<transport::Transport> control, [[maybe_unused]] int32_t ordinal,
    [[maybe_unused]] std::chrono::milliseconds timeout) {
  if (control->size() == 1) {
    return std::move(transport::CreateInprocGroup(1, [](std::byte* to, const std::byte* from, int64_t bytes) {
      return kernels::cuda::CopyBetweenPlaces(to, from, bytes);
    })[0]);
  }
#if LRMOE_NCCL
  return transport::CreateNcclTransport(std::move(control), {.device = ordinal, .start_timeout = timeout});
#else
  return absl::UnimplementedError("this worker is built without NCCL, which several CUDA devices need");
#endif
}

}  // namespace lrmoe
