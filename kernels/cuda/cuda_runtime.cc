// The runtime over CUDA: virtual memory management for ranges that grow in place, one stream.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_interprocess.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/device.h"
#include "kernels/cuda/inventory.h"

namespace lrmoe::kernels::cuda {
namespace {

struct Driver {
  PFN_cuMemGetAllocationGranularity_v10020 granularity = nullptr;
  PFN_cuMemAddressReserve_v10020 reserve = nullptr;
  PFN_cuMemAddressFree_v10020 free = nullptr;
  PFN_cuMemCreate_v10020 create = nullptr;
  PFN_cuMemRelease_v10020 release = nullptr;
  PFN_cuMemMap_v10020 map = nullptr;
  PFN_cuMemUnmap_v10020 unmap = nullptr;
  PFN_cuMemSetAccess_v10020 set_access = nullptr;
};

absl::Status FindDriver(Driver* driver) {
  absl::Status status = FindDriverFunction("cuMemGetAllocationGranularity", &driver->granularity);
  status.Update(FindDriverFunction("cuMemAddressReserve", &driver->reserve));
  status.Update(FindDriverFunction("cuMemAddressFree", &driver->free));
  status.Update(FindDriverFunction("cuMemCreate", &driver->create));
  status.Update(FindDriverFunction("cuMemRelease", &driver->release));
  status.Update(FindDriverFunction("cuMemMap", &driver->map));
  status.Update(FindDriverFunction("cuMemUnmap", &driver->unmap));
  status.Update(FindDriverFunction("cuMemSetAccess", &driver->set_access));
  return status;
}

int64_t RoundUp(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

// That CUDA shows a device of this ordinal.
absl::Status LookFor(int32_t ordinal) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess)
    return absl::FailedPreconditionError(ToStatus(error, "looking for devices").message());
  if (ordinal < 0 || ordinal >= count)
    return absl::NotFoundError(absl::StrCat("ordinal is ", ordinal, "; allowed: 0..", count - 1));
  return absl::OkStatus();
}

class CudaRuntime;

// A range of device addresses; memory is mapped from its start on.
class DeviceMemory : public Memory {
 public:
  DeviceMemory(CudaRuntime* runtime, CUdeviceptr base, int64_t capacity) : runtime_(runtime) {
    base_ = reinterpret_cast<std::byte*>(base);
    capacity_ = capacity;
  }
  ~DeviceMemory() override;
  absl::Status Commit(int64_t end) override;
  bool Has(const void* pointer) const { return pointer >= base_ && pointer < base_ + mapped_; }

 private:
  CudaRuntime* const runtime_;
  int64_t mapped_ = 0;
  std::vector<std::pair<int64_t, CUmemGenericAllocationHandle>> parts_;  // bytes, in order
};

class PinnedMemory : public Memory {
 public:
  PinnedMemory(Runtime* runtime, void* base, int64_t capacity) : runtime_(runtime) {
    base_ = static_cast<std::byte*>(base);
    capacity_ = capacity;
  }
  // Freeing waits for the device, without a limit; when that never gets on, it is freed with the process.
  ~PinnedMemory() override {
    if (!absl::IsDeadlineExceeded(runtime_->Synchronize())) (void)cudaFreeHost(base_);
  }
  absl::Status Commit(int64_t) override { return absl::OkStatus(); }

 private:
  Runtime* const runtime_;
};

class CudaRuntime : public Runtime {
 public:
  explicit CudaRuntime(int32_t ordinal) : ordinal_(ordinal) {}
  ~CudaRuntime() override {
    if (stream_ != nullptr) (void)cudaStreamDestroy(stream_);
  }

  absl::Status Start() {
    if (absl::Status present = LookFor(ordinal_); !present.ok()) return present;
    if (absl::Status current = MakeCurrent(); !current.ok()) return current;
    cudaDeviceProp properties;
    LRMOE_CUDA_RETURN_IF_ERROR(cudaGetDeviceProperties(&properties, ordinal_));
    name_ =
        absl::StrCat(properties.name, " (cuda:", ordinal_, ", sm_", properties.major, properties.minor, ")");
    memory_bytes_ = static_cast<int64_t>(properties.totalGlobalMem);
    LRMOE_CUDA_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    if (absl::Status status = FindDriver(&driver_); !status.ok()) return status;
    absl::StatusOr<std::unique_ptr<CudaInterprocess>> interprocess =
        CudaInterprocess::Create(ordinal_, stream_);
    if (!interprocess.ok()) return interprocess.status();
    interprocess_ = *std::move(interprocess);
    const CUmemAllocationProp wanted = Property();
    size_t granularity = 0;
    absl::Status status = ToStatus(
        driver_.granularity(&granularity, &wanted, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED), "granularity");
    granularity_ = static_cast<int64_t>(granularity);
    return status;
  }

  absl::string_view name() const override { return name_; }
  Stream stream() const override { return stream_; }
  int64_t memory_bytes() const override { return memory_bytes_; }
  const Driver& driver() const { return driver_; }
  int64_t granularity() const { return granularity_; }
  absl::Status MakeCurrent() const { return ToStatus(cudaSetDevice(ordinal_), "choosing the device"); }

  CUmemAllocationProp Property() const {
    CUmemAllocationProp property{};
    property.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    property.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = ordinal_};
    return property;
  }

  bool Holds(const void* pointer) const override {
    for (const DeviceMemory* range : ranges_)
      if (range->Has(pointer)) return true;
    if (interprocess_->Holds(pointer)) return true;
    // PyTorch's of this process, say.
    cudaPointerAttributes attributes{};
    if (cudaPointerGetAttributes(&attributes, pointer) != cudaSuccess) {
      (void)cudaGetLastError();
      return false;
    }
    return attributes.type == cudaMemoryTypeDevice && attributes.device == ordinal_;
  }

  absl::StatusOr<std::unique_ptr<Memory>> Reserve(int64_t bytes) override {
    if (absl::Status current = MakeCurrent(); !current.ok()) return current;
    const int64_t capacity = RoundUp(std::max<int64_t>(bytes, 1), granularity_);
    CUdeviceptr base = 0;
    if (absl::Status status =
            ToStatus(driver_.reserve(&base, capacity, 0, 0, 0), "reserving device addresses");
        !status.ok())
      return status;
    auto memory = std::make_unique<DeviceMemory>(this, base, capacity);
    ranges_.push_back(memory.get());
    return memory;
  }

  absl::StatusOr<std::unique_ptr<Memory>> AllocatePinned(int64_t bytes) override {
    if (absl::Status current = MakeCurrent(); !current.ok()) return current;
    void* base = nullptr;
    LRMOE_CUDA_RETURN_IF_ERROR(cudaHostAlloc(&base, bytes, cudaHostAllocPortable));
    return std::make_unique<PinnedMemory>(this, base, bytes);
  }

  absl::Status Copy(void* dst, const void* src, int64_t bytes, Direction direction) override {
    if (absl::Status current = MakeCurrent(); !current.ok()) return current;
    const cudaMemcpyKind kind = direction == Direction::kToDevice ? cudaMemcpyHostToDevice
                                : direction == Direction::kToHost ? cudaMemcpyDeviceToHost
                                                                  : cudaMemcpyDeviceToDevice;
    return ToStatus(cudaMemcpyAsync(dst, src, bytes, kind, stream_), "copy");
  }

  absl::Status Fill(void* dst, uint8_t value, int64_t bytes) override {
    if (absl::Status current = MakeCurrent(); !current.ok()) return current;
    return ToStatus(cudaMemsetAsync(dst, value, bytes, stream_), "fill");
  }

  absl::Status Launch(absl::FunctionRef<absl::Status()> enqueue) override {
    if (absl::Status current = MakeCurrent(); !current.ok()) return current;
    return enqueue();
  }

  absl::Status Synchronize() override {
    if (absl::Status current = MakeCurrent(); !current.ok()) return current;
    if (absl::Status fired = interprocess_->WaitForEvents(); !fired.ok()) return fired;
    return ToStatus(cudaStreamSynchronize(stream_), "waiting for the device");
  }
  Interprocess& interprocess() override { return *interprocess_; }

  void Forget(const DeviceMemory* range) { std::erase(ranges_, range); }

 private:
  const int32_t ordinal_;
  std::string name_;
  int64_t memory_bytes_ = 0;
  int64_t granularity_ = 0;
  cudaStream_t stream_ = nullptr;
  Driver driver_;
  std::unique_ptr<CudaInterprocess> interprocess_;
  std::vector<const DeviceMemory*> ranges_;
};

DeviceMemory::~DeviceMemory() {
  runtime_->Forget(this);
  // Unmapping does not wait for kernels. When these never get on, it is unmapped with the process.
  if (absl::IsDeadlineExceeded(runtime_->Synchronize())) return;
  const Driver& driver = runtime_->driver();
  const auto base = reinterpret_cast<CUdeviceptr>(base_);
  int64_t at = 0;
  for (const auto& [bytes, handle] : parts_) {
    (void)driver.unmap(base + at, bytes);
    (void)driver.release(handle);
    at += bytes;
  }
  (void)driver.free(base, capacity_);
}

absl::Status DeviceMemory::Commit(int64_t end) {
  if (end > capacity_) return absl::ResourceExhaustedError(absl::StrCat(end, " of ", capacity_, " bytes"));
  const int64_t bytes = RoundUp(end, runtime_->granularity()) - mapped_;
  if (bytes <= 0) return absl::OkStatus();
  if (absl::Status status = runtime_->MakeCurrent(); !status.ok()) return status;
  const Driver& driver = runtime_->driver();
  const CUmemAllocationProp property = runtime_->Property();
  CUmemGenericAllocationHandle handle = 0;
  absl::Status status = ToStatus(driver.create(&handle, bytes, &property, 0),
                                 absl::StrCat("allocating ", bytes, " bytes of device memory"));
  if (!status.ok()) return status;
  const auto at = reinterpret_cast<CUdeviceptr>(base_) + mapped_;
  status = ToStatus(driver.map(at, bytes, 0, handle, 0), "mapping device memory");
  if (!status.ok()) {
    (void)driver.release(handle);
    return status;
  }
  const CUmemAccessDesc access{.location = property.location, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  status = ToStatus(driver.set_access(at, bytes, &access, 1), "opening device memory");
  if (!status.ok()) {
    (void)driver.unmap(at, bytes);
    (void)driver.release(handle);
    return status;
  }
  parts_.emplace_back(bytes, handle);
  mapped_ += bytes;
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> CreateCudaDevice(int32_t ordinal, GemmPathRule rule) {
  auto runtime = std::make_unique<CudaRuntime>(ordinal);
  if (absl::Status status = runtime->Start(); !status.ok()) return status;
  absl::StatusOr<std::unique_ptr<GemmBackend>> gemm = CreateCublasGemm(rule);
  if (!gemm.ok()) return gemm.status();
  return MakeCudaDevice(std::move(runtime), *std::move(gemm));
}

absl::Status CopyBetweenPlaces(void* to, const void* from, int64_t bytes) {
  LRMOE_CUDA_RETURN_IF_ERROR(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, cudaStreamPerThread));
  return ToStatus(cudaStreamSynchronize(cudaStreamPerThread), "copy between ranks");
}

Inventory TakeInventory() {
  Inventory inventory;
  inventory.built = true;
  (void)cudaRuntimeGetVersion(&inventory.runtime_version);
  (void)cudaDriverGetVersion(&inventory.driver_version);  // 0: there is none
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    inventory.error = cudaGetErrorName(error);
    return inventory;
  }
  for (int32_t ordinal = 0; ordinal < count; ++ordinal) {
    cudaDeviceProp properties;
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, ordinal); error != cudaSuccess) {
      inventory.error = cudaGetErrorName(error);
      return inventory;
    }
    DeviceFacts facts;
    facts.name = properties.name;
    facts.uuid.assign(properties.uuid.bytes, sizeof(properties.uuid.bytes));
    facts.compute_capability = properties.major * 10 + properties.minor;
    facts.memory_bytes = static_cast<int64_t>(properties.totalGlobalMem);
    inventory.devices.push_back(std::move(facts));
  }
  return inventory;
}

}  // namespace lrmoe::kernels::cuda
