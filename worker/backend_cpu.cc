#include "worker/backend.h"

namespace lrmoe {
namespace {

absl::Status WithoutCuda() {
  return absl::UnimplementedError("this worker is built without CUDA");
}

}  // namespace

bool BuiltWithCuda() {
  return false;
}
bool BuiltWithNccl() {
  return false;
}

kernels::cuda::Inventory LookForDevices() {
  return {};
}

absl::StatusOr<std::unique_ptr<kernels::Device>> MakeDevice(int32_t) {
  return WithoutCuda();
}

absl::StatusOr<std::unique_ptr<transport::Transport>> ConnectDevices(std::unique_ptr<transport::Transport>,
                                                                     int32_t, std::chrono::milliseconds) {
  return WithoutCuda();
}

}  // namespace lrmoe
