#include "kernels/cuda/cuda_interprocess.h"

#include <algorithm>
#include <cstring>
#include <thread>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"

namespace lrmoe::kernels::cuda {
namespace {

static_assert(sizeof(cudaIpcMemHandle_t) == kSharedHandleBytes);
static_assert(sizeof(cudaIpcEventHandle_t) == kSharedHandleBytes);

absl::Status NotOpened(cudaError_t error, absl::string_view what) {
  (void)cudaGetLastError();  // else the next launch would report it
  return absl::FailedPreconditionError(
      absl::StrCat("handle: opening ", what, ": ", cudaGetErrorName(error), ": ", cudaGetErrorString(error)));
}

}  // namespace

class CudaInterprocess::OpenedMemory final : public Memory {
 public:
  OpenedMemory(CudaInterprocess* owner, void* base, int64_t bytes) : owner_(owner) {
    base_ = static_cast<std::byte*>(base);
    capacity_ = bytes;
    owner_->opened_.push_back(this);
  }
  ~OpenedMemory() override {
    std::erase(owner_->opened_, this);
    (void)owner_->MakeCurrent();
    if (!owner_->WaitForEvents().ok()) return;     // the stream never gets on; closed with the process
    (void)cudaStreamSynchronize(owner_->stream_);  // closing does not wait for kernels
    (void)cudaIpcCloseMemHandle(base_);
  }
  absl::Status Commit(int64_t end) override {
    if (end > capacity_) return absl::ResourceExhaustedError(absl::StrCat(end, " of ", capacity_, " bytes"));
    return absl::OkStatus();
  }
  bool Has(const void* pointer) const { return pointer >= base_ && pointer < base_ + capacity_; }

 private:
  CudaInterprocess* const owner_;
};

class CudaInterprocess::OwnedEvent {
 public:
  explicit OwnedEvent(cudaEvent_t event) : event_(event) {}
  ~OwnedEvent() { (void)cudaEventDestroy(event_); }
  OwnedEvent(const OwnedEvent&) = delete;
  OwnedEvent& operator=(const OwnedEvent&) = delete;
  cudaEvent_t get() const { return event_; }

 private:
  cudaEvent_t event_;
};

class CudaInterprocess::Event final : public SharedEvent {
 public:
  Event(CudaInterprocess* owner, std::shared_ptr<const OwnedEvent> event, std::string handle)
      : SharedEvent(std::move(handle)), owner_(owner), event_(std::move(event)) {}
  absl::Status Record() override {
    if (absl::Status current = owner_->MakeCurrent(); !current.ok()) return current;
    return ToStatus(cudaEventRecord(event_->get(), owner_->stream_), "recording a shared event");
  }
  absl::Status Await(std::chrono::milliseconds limit) override {
    if (absl::Status current = owner_->MakeCurrent(); !current.ok()) return current;
    LRMOE_CUDA_RETURN_IF_ERROR(cudaStreamWaitEvent(owner_->stream_, event_->get(), 0));
    owner_->awaited_.push_back({event_, std::chrono::steady_clock::now() + limit, limit});
    return absl::OkStatus();
  }

 private:
  CudaInterprocess* const owner_;
  const std::shared_ptr<const OwnedEvent> event_;
};

absl::StatusOr<std::unique_ptr<CudaInterprocess>> CudaInterprocess::Create(int32_t ordinal,
                                                                           cudaStream_t stream) {
  std::unique_ptr<CudaInterprocess> made(new CudaInterprocess(ordinal, stream));
  if (absl::Status current = made->MakeCurrent(); !current.ok()) return current;
  // The driver's, as the training process asks for it: with MIG the runtime's is the whole device's.
  PFN_cuDeviceGet_v2000 device_get = nullptr;
  PFN_cuDeviceGetUuid_v11040 device_uuid = nullptr;
  absl::Status status = FindDriverFunction("cuDeviceGet", &device_get);
  status.Update(FindDriverFunction("cuDeviceGetUuid", &device_uuid));
  status.Update(FindDriverFunction("cuMemGetAddressRange", &made->address_range_));
  if (!status.ok()) return status;
  CUdevice device = 0;
  CUuuid uuid{};
  status = ToStatus(device_get(&device, ordinal), "the device");
  status.Update(ToStatus(device_uuid(&uuid, device), "the device's UUID"));
  if (!status.ok()) return status;
  made->uuid_.assign(uuid.bytes, sizeof(uuid.bytes));
  return made;
}

absl::Status CudaInterprocess::MakeCurrent() const {
  return ToStatus(cudaSetDevice(ordinal_), "choosing the device");
}

bool CudaInterprocess::Holds(const void* pointer) const {
  return std::any_of(opened_.begin(), opened_.end(),
                     [pointer](const OpenedMemory* memory) { return memory->Has(pointer); });
}

absl::StatusOr<std::unique_ptr<Memory>> CudaInterprocess::OpenMemory(absl::string_view handle,
                                                                     int64_t bytes) {
  absl::Status status = CheckSharedHandle(handle);
  status.Update(MakeCurrent());
  if (!status.ok()) return status;
  cudaIpcMemHandle_t cuda_handle;
  std::memcpy(&cuda_handle, handle.data(), sizeof(cuda_handle));
  void* base = nullptr;
  const cudaError_t opened = cudaIpcOpenMemHandle(&base, cuda_handle, cudaIpcMemLazyEnablePeerAccess);
  if (opened != cudaSuccess) return NotOpened(opened, "memory");
  auto memory = std::make_unique<OpenedMemory>(this, base, bytes);
  CUdeviceptr start = 0;
  size_t size = 0;
  status =
      ToStatus(address_range_(&start, &size, reinterpret_cast<CUdeviceptr>(base)), "the allocation's size");
  if (!status.ok()) return status;
  if (bytes < 1 || static_cast<size_t>(bytes) > size)
    return absl::InvalidArgumentError(
        absl::StrCat("bytes: ", bytes, ", allowed are 1..", size, ", the size of the allocation"));
  return memory;
}

absl::StatusOr<std::unique_ptr<SharedEvent>> CudaInterprocess::OpenEvent(absl::string_view handle) {
  absl::Status status = CheckSharedHandle(handle);
  status.Update(MakeCurrent());
  if (!status.ok()) return status;
  cudaIpcEventHandle_t cuda_handle;
  std::memcpy(&cuda_handle, handle.data(), sizeof(cuda_handle));
  cudaEvent_t event = nullptr;
  const cudaError_t opened = cudaIpcOpenEventHandle(&event, cuda_handle);
  if (opened != cudaSuccess) return NotOpened(opened, "an event");
  return std::make_unique<Event>(this, std::make_shared<OwnedEvent>(event), std::string(handle));
}

absl::StatusOr<std::unique_ptr<SharedEvent>> CudaInterprocess::MakeEvent() {
  if (absl::Status current = MakeCurrent(); !current.ok()) return current;
  cudaEvent_t event = nullptr;
  LRMOE_CUDA_RETURN_IF_ERROR(
      cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventInterprocess));
  auto owned = std::make_shared<OwnedEvent>(event);
  cudaIpcEventHandle_t handle;
  LRMOE_CUDA_RETURN_IF_ERROR(cudaIpcGetEventHandle(&handle, event));
  return std::make_unique<Event>(this, std::move(owned),
                                 std::string(reinterpret_cast<const char*>(&handle), sizeof(handle)));
}

absl::Status CudaInterprocess::WaitForEvents() {
  while (!awaited_.empty()) {
    const Awaited& next = awaited_.front();
    const cudaError_t fired = cudaEventQuery(next.event->get());
    if (fired == cudaSuccess) {
      awaited_.erase(awaited_.begin());
    } else if (fired != cudaErrorNotReady) {
      return ToStatus(fired, "waiting for another process's event");
    } else if (std::chrono::steady_clock::now() >= next.until) {
      return absl::DeadlineExceededError(
          absl::StrCat("the event of another process on the device did not fire "
                       "within ",
                       next.limit.count(), " ms"));
    } else {
      (void)cudaGetLastError();  // not ready is an error, too, which the next launch would report
      std::this_thread::yield();
    }
  }
  return absl::OkStatus();
}

}  // namespace lrmoe::kernels::cuda
