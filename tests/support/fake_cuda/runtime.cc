// Devices, errors, what tests arrange, and memory and events of other processes.
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstring>

#include "tests/support/fake_cuda/state.h"

namespace lrmoe::fake_cuda {

int64_t CountPhysical();  // driver.cc
void ResetDriver();
void ResetNccl();  // nccl.cc

namespace {

thread_local int current_device = 0;
thread_local cudaError_t last_error = cudaSuccess;

std::string NextHandle(const char* kind) {
  static int last = 0;
  std::string handle(CUDA_IPC_HANDLE_SIZE, '\0');
  std::snprintf(handle.data(), handle.size(), "fake %s %d", kind, ++last);
  return handle;
}
template <typename Handle>
std::string Text(const Handle& handle) {
  return {handle.reserved, sizeof(handle.reserved)};
}

std::shared_ptr<EventState> Shared(const std::string& handle) {
  const auto found = Its().shared_events.find(handle);
  return found == Its().shared_events.end() ? nullptr : found->second.lock();
}
std::shared_ptr<EventState> SharedOrMisuse(const std::string& handle) {
  std::shared_ptr<EventState> state = Shared(handle);
  if (state == nullptr) Misuse("the other process has an event that is gone");
  return state;
}

}  // namespace

std::mutex& Mutex() {
  static std::mutex mutex;
  return mutex;
}
State& Its() {
  static State state;
  return state;
}

int Injected(const char* function) {
  const auto found = Its().failures.find(function);
  if (found == Its().failures.end() || found->second.error == kMissing || --found->second.nth > 0) return 0;
  const int error = found->second.error;
  Its().failures.erase(found);
  return error;
}
cudaError_t Return(cudaError_t error) {
  if (error != cudaSuccess) last_error = error;
  return error;
}
bool NoOlderError() {
  return last_error == cudaSuccess;
}
int CurrentDevice() {
  return current_device;
}
cudaError_t Enter(const char* function) {
  if (!Its().driver) return cudaErrorInsufficientDriver;
  if (Its().devices == 0) return cudaErrorNoDevice;
  return static_cast<cudaError_t>(Injected(function));
}

void Reset() {
  if (!(CountLive() == Live{})) Misuse("something is still alive");
  EndProcess();
}
void EndProcess() {
  const Lock lock(Mutex());
  Its() = State();
  ResetDriver();
  ResetNccl();
  current_device = 0;
  last_error = cudaSuccess;
}
void SetDeviceCount(int count) {
  const Lock lock(Mutex());
  Its().devices = count;
}
void RemoveDriver() {
  const Lock lock(Mutex());
  Its().driver = false;
}
void SetMemory(int64_t bytes_per_device) {
  const Lock lock(Mutex());
  Its().memory_bytes = bytes_per_device;
}
void Fail(const std::string& function, int error, int nth) {
  const Lock lock(Mutex());
  Its().failures[function] = {error, nth};
}

Live CountLive() {
  const Lock lock(Mutex());
  Live live;
  live.streams = static_cast<int64_t>(Its().streams.size());
  live.events = static_cast<int64_t>(Its().events.size());
  live.reservations = static_cast<int64_t>(Its().reservations.size());
  live.blas_handles = Its().blas_handles;
  live.communicators = Its().communicators;
  live.device_allocations = CountPhysical();
  for (const auto& [_, block] : Its().blocks) {
    live.device_allocations += block.kind == Kind::kMalloc || block.kind == Kind::kPool;
    live.pinned += block.kind == Kind::kPinned;
    live.opened += block.kind == Kind::kOpened;
  }
  return live;
}
Gemms CountGemms() {
  const Lock lock(Mutex());
  return Its().gemms;
}

ForeignMemory::ForeignMemory(int device, int64_t bytes) {
  const Lock lock(Mutex());
  handle_ = NextHandle("memory");
  const int file = memfd_create("fake-cuda", MFD_CLOEXEC);
  const int64_t pages = (bytes + 4095) / 4096 * 4096;
  if (file < 0 || ftruncate(file, pages) != 0) Misuse("no memory file");
  auto* const at = static_cast<std::byte*>(mmap(nullptr, pages, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0));
  std::memset(at, 0xFF, pages);
  bytes_ = {at, static_cast<size_t>(bytes)};
  Its().foreign[handle_] = {at, bytes, file, device, nullptr};
}
ForeignMemory::~ForeignMemory() {
  const Lock lock(Mutex());
  const State::Foreign& memory = Its().foreign.at(handle_);
  if (memory.opened != nullptr) Misuse("the other process frees memory that is open here");
  munmap(memory.theirs, memory.bytes);
  close(memory.file);
  Its().foreign.erase(handle_);
}

ForeignEvent::ForeignEvent() {
  const Lock lock(Mutex());
  handle_ = NextHandle("event");
  Its().shared_events[handle_] = Its().foreign_events[handle_] = std::make_shared<EventState>();
}
ForeignEvent::ForeignEvent(const std::string& ours) : handle_(ours) {
  const Lock lock(Mutex());
  Its().foreign_events[ours] = SharedOrMisuse(ours);
}
void ForeignEvent::Record() {
  const Lock lock(Mutex());
  SharedOrMisuse(handle_)->last = std::make_shared<Mark>();
}
void ForeignEvent::Fire() {
  const Lock lock(Mutex());
  SharedOrMisuse(handle_)->last->fired = true;
}
bool ForeignEvent::Fired() const {
  const Lock lock(Mutex());
  const std::shared_ptr<Mark> mark = SharedOrMisuse(handle_)->last;
  return mark == nullptr || mark->fired;
}

}  // namespace lrmoe::fake_cuda

using namespace lrmoe::fake_cuda;  // NOLINT: what follows are CUDA's own functions

cudaError_t cudaGetLastError() {
  return std::exchange(last_error, cudaSuccess);
}
const char* cudaGetErrorName(cudaError_t error) {
  switch (error) {
    case cudaErrorInvalidValue:
      return "cudaErrorInvalidValue";
    case cudaErrorMemoryAllocation:
      return "cudaErrorMemoryAllocation";
    case cudaErrorNoDevice:
      return "cudaErrorNoDevice";
    case cudaErrorInsufficientDriver:
      return "cudaErrorInsufficientDriver";
    case cudaErrorInvalidDevice:
      return "cudaErrorInvalidDevice";
    case cudaErrorInvalidResourceHandle:
      return "cudaErrorInvalidResourceHandle";
    case cudaErrorNotReady:
      return "cudaErrorNotReady";
    case cudaErrorIllegalAddress:
      return "cudaErrorIllegalAddress";
    default:
      return "cudaError of this fake";
  }
}
const char* cudaGetErrorString(cudaError_t) {
  return "as the fake was told";
}

cudaError_t cudaSetDevice(int device) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  if (device < 0 || device >= Its().devices) return Return(cudaErrorInvalidDevice);
  current_device = device;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceCount(int* count) {
  const Lock lock(Mutex());
  *count = 0;
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  *count = Its().devices;
  return cudaSuccess;
}
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int device) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  if (device < 0 || device >= Its().devices) return Return(cudaErrorInvalidDevice);
  *properties = {};
  std::snprintf(properties->name, sizeof(properties->name), "Fake");
  std::memcpy(properties->uuid.bytes, "fake CUDA device", sizeof(properties->uuid.bytes));
  properties->uuid.bytes[15] = static_cast<char>(device);
  properties->major = 9;
  properties->totalGlobalMem = static_cast<size_t>(Its().memory_bytes);
  return cudaSuccess;
}
cudaError_t cudaRuntimeGetVersion(int* version) {
  *version = CUDART_VERSION;
  return cudaSuccess;
}
cudaError_t cudaDriverGetVersion(int* version) {
  const Lock lock(Mutex());
  *version = Its().driver ? CUDA_VERSION : 0;
  return cudaSuccess;
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t* handle, cudaEvent_t event) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  const CUevent_st& exported = Known(event, __func__);
  if ((exported.flags & cudaEventInterprocess) == 0) return Return(cudaErrorInvalidResourceHandle);
  const std::string name = NextHandle("event");
  std::memcpy(handle->reserved, name.data(), name.size());
  Its().shared_events[name] = exported.state;
  return cudaSuccess;
}
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t* event, cudaIpcEventHandle_t handle) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  std::shared_ptr<EventState> state = Shared(Text(handle));
  if (state == nullptr) return Return(cudaErrorInvalidResourceHandle);
  auto opened = std::make_unique<CUevent_st>();
  opened->device = CurrentDevice();
  opened->flags = cudaEventInterprocess | cudaEventDisableTiming;
  opened->state = std::move(state);
  *event = opened.get();
  Its().events[*event] = std::move(opened);
  return cudaSuccess;
}

// On the current device, which must be the memory's.
cudaError_t cudaIpcOpenMemHandle(void** pointer, cudaIpcMemHandle_t handle, unsigned flags) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  if (flags != cudaIpcMemLazyEnablePeerAccess) return Return(cudaErrorInvalidValue);
  const auto found = Its().foreign.find(Text(handle));
  if (found == Its().foreign.end()) return Return(cudaErrorInvalidResourceHandle);
  State::Foreign& memory = found->second;
  if (memory.opened != nullptr) Misuse("memory of another process is opened twice");
  const int64_t pages = (memory.bytes + 4095) / 4096 * 4096;
  memory.opened = static_cast<std::byte*>(mmap(nullptr, pages, PROT_NONE, MAP_SHARED, memory.file, 0));
  AddBlock({.base = memory.opened,
            .bytes = memory.bytes,
            .mapped = pages,
            .device = CurrentDevice(),
            .kind = Kind::kOpened});
  *pointer = memory.opened;
  return cudaSuccess;
}
// Does not wait.
cudaError_t cudaIpcCloseMemHandle(void* pointer) {
  const Lock lock(Mutex());
  for (auto& [_, memory] : Its().foreign)
    if (memory.opened == pointer) {
      munmap(pointer, Its().blocks.at(memory.opened).mapped);
      Its().blocks.erase(std::exchange(memory.opened, nullptr));
      return cudaSuccess;
    }
  Misuse("cudaIpcCloseMemHandle of what is not open");
}
