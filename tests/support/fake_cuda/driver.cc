// The driver's functions, found by name: virtual memory, and what memory and device there are.
#include <sys/mman.h>

#include <cstring>

#include "tests/support/fake_cuda/state.h"

namespace lrmoe::fake_cuda {
namespace {

constexpr int64_t kGranularity = 64 << 10;  // a device's is 2 MiB

// Physical memory by handle: device and bytes, and where it is mapped.
struct Physical {
  int device;
  int64_t bytes;
  std::byte* mapped = nullptr;
  bool released = false;
};
std::map<CUmemGenericAllocationHandle, Physical>& AllPhysical() {
  static std::map<CUmemGenericAllocationHandle, Physical> all;
  return all;
}
std::byte* Address(CUdeviceptr pointer) {
  return reinterpret_cast<std::byte*>(pointer);
}
CUresult Error(const char* function) {
  return static_cast<CUresult>(Injected(function));
}

// Both the mapping and the handle keep it.
void GiveBack(CUmemGenericAllocationHandle handle) {
  const Physical& one = AllPhysical().at(handle);
  if (!one.released || one.mapped != nullptr) return;
  Its().used_bytes[one.device] -= one.bytes;
  AllPhysical().erase(handle);
}

CUresult Granularity(size_t* granularity, const CUmemAllocationProp* wanted,
                     CUmemAllocationGranularity_flags) {
  const Lock lock(Mutex());
  if (const CUresult error = Error("cuMemGetAllocationGranularity"); error != CUDA_SUCCESS) return error;
  if (wanted->type != CU_MEM_ALLOCATION_TYPE_PINNED || wanted->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
    return CUDA_ERROR_INVALID_VALUE;
  *granularity = kGranularity;
  return CUDA_SUCCESS;
}

CUresult Reserve(CUdeviceptr* pointer, size_t size, size_t alignment, CUdeviceptr address,
                 unsigned long long flags) {
  const Lock lock(Mutex());
  if (const CUresult error = Error("cuMemAddressReserve"); error != CUDA_SUCCESS) return error;
  if (size == 0 || size % kGranularity != 0 || alignment != 0 || address != 0 || flags != 0)
    return CUDA_ERROR_INVALID_VALUE;
  // The ends that are too much for an aligned range go back.
  void* const more =
      mmap(nullptr, size + kGranularity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (more == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  const auto first = reinterpret_cast<CUdeviceptr>(more);
  *pointer = (first + kGranularity - 1) / kGranularity * kGranularity;
  const size_t before = *pointer - first;
  if (before > 0) munmap(more, before);
  if (before < kGranularity) munmap(Address(*pointer) + size, kGranularity - before);
  Its().reservations[Address(*pointer)] = static_cast<int64_t>(size);
  return CUDA_SUCCESS;
}

CUresult FreeAddresses(CUdeviceptr pointer, size_t size) {
  const Lock lock(Mutex());
  const auto found = Its().reservations.find(Address(pointer));
  if (found == Its().reservations.end() || found->second != static_cast<int64_t>(size))
    Misuse("cuMemAddressFree of what was not reserved so");
  const auto first = Its().blocks.lower_bound(Address(pointer));
  if (first != Its().blocks.end() && first->first < Address(pointer) + size)
    Misuse("cuMemAddressFree of a range in which memory is mapped");
  munmap(Address(pointer), size);
  Its().reservations.erase(found);
  return CUDA_SUCCESS;
}

CUresult Create(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp* property,
                unsigned long long flags) {
  const Lock lock(Mutex());
  if (const CUresult error = Error("cuMemCreate"); error != CUDA_SUCCESS) return error;
  if (size == 0 || size % kGranularity != 0 || flags != 0) return CUDA_ERROR_INVALID_VALUE;
  if (property->location.id < 0 || property->location.id >= Its().devices) return CUDA_ERROR_INVALID_DEVICE;
  int64_t& used = Its().used_bytes[property->location.id];
  if (used + static_cast<int64_t>(size) > Its().memory_bytes) return CUDA_ERROR_OUT_OF_MEMORY;
  used += static_cast<int64_t>(size);
  static CUmemGenericAllocationHandle last = 0;
  AllPhysical()[*handle = ++last] = {.device = property->location.id, .bytes = static_cast<int64_t>(size)};
  return CUDA_SUCCESS;
}

CUresult ReleaseHandle(CUmemGenericAllocationHandle handle) {
  const Lock lock(Mutex());
  const auto found = AllPhysical().find(handle);
  if (found == AllPhysical().end() || found->second.released) Misuse("cuMemRelease of no handle, or twice");
  found->second.released = true;
  GiveBack(handle);
  return CUDA_SUCCESS;
}

CUresult Map(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags) {
  const Lock lock(Mutex());
  if (const CUresult error = Error("cuMemMap"); error != CUDA_SUCCESS) return error;
  const auto physical = AllPhysical().find(handle);
  if (physical == AllPhysical().end() || physical->second.released) Misuse("cuMemMap of no memory");
  if (static_cast<int64_t>(size) != physical->second.bytes || offset != 0 || flags != 0)
    return CUDA_ERROR_INVALID_VALUE;
  std::byte* const at = Address(pointer);
  const auto range = Its().reservations.upper_bound(at);
  if (range == Its().reservations.begin() || at + size > std::prev(range)->first + std::prev(range)->second ||
      pointer % kGranularity != 0)
    return CUDA_ERROR_INVALID_VALUE;
  const auto next = Its().blocks.lower_bound(at);
  if ((next != Its().blocks.end() && next->first < at + size) || Find(at) != nullptr)
    return CUDA_ERROR_INVALID_VALUE;
  physical->second.mapped = at;
  AddBlock({.base = at,
            .bytes = static_cast<int64_t>(size),
            .mapped = static_cast<int64_t>(size),
            .device = physical->second.device,
            .kind = Kind::kMapped,
            .accessible = false});
  return CUDA_SUCCESS;
}

// Does not wait: work that still comes finds nothing there.
CUresult Unmap(CUdeviceptr pointer, size_t size) {
  const Lock lock(Mutex());
  const auto block = Its().blocks.find(Address(pointer));
  if (block == Its().blocks.end() || block->second.kind != Kind::kMapped ||
      block->second.bytes != static_cast<int64_t>(size))
    Misuse("cuMemUnmap of what was not mapped so");
  mmap(Address(pointer), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  Its().blocks.erase(block);
  for (auto& [handle, physical] : std::map(AllPhysical()))
    if (physical.mapped == Address(pointer)) {
      AllPhysical()[handle].mapped = nullptr;
      GiveBack(handle);
    }
  return CUDA_SUCCESS;
}

CUresult SetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc* access, size_t count) {
  const Lock lock(Mutex());
  if (const CUresult error = Error("cuMemSetAccess"); error != CUDA_SUCCESS) return error;
  const auto block = Its().blocks.find(Address(pointer));
  if (block == Its().blocks.end() || block->second.bytes != static_cast<int64_t>(size) || count != 1 ||
      access->location.id != block->second.device || access->flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    return CUDA_ERROR_INVALID_VALUE;
  block->second.accessible = true;
  Protect(block->second);
  return CUDA_SUCCESS;
}

CUresult AddressRange(CUdeviceptr* base, size_t* size, CUdeviceptr pointer) {
  const Lock lock(Mutex());
  if (const CUresult error = Error("cuMemGetAddressRange"); error != CUDA_SUCCESS) return error;
  const Block* const block = Find(Address(pointer));
  if (block == nullptr) return CUDA_ERROR_NOT_FOUND;
  *base = reinterpret_cast<CUdeviceptr>(block->base);
  *size = static_cast<size_t>(block->bytes);
  return CUDA_SUCCESS;
}

CUresult DeviceGet(CUdevice* device, int ordinal) {
  const Lock lock(Mutex());
  if (const CUresult error = Error("cuDeviceGet"); error != CUDA_SUCCESS) return error;
  if (ordinal < 0 || ordinal >= Its().devices) return CUDA_ERROR_INVALID_DEVICE;
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult DeviceUuid(CUuuid* uuid, CUdevice device) {
  const Lock lock(Mutex());
  if (const CUresult error = Error("cuDeviceGetUuid"); error != CUDA_SUCCESS) return error;
  std::memcpy(uuid->bytes, "fake CUDA device", sizeof(uuid->bytes));
  uuid->bytes[15] = static_cast<char>(device);
  return CUDA_SUCCESS;
}

const std::map<std::string, void*>& Functions() {
  static const std::map<std::string, void*> all{
      {"cuMemGetAllocationGranularity", reinterpret_cast<void*>(&Granularity)},
      {"cuMemAddressReserve", reinterpret_cast<void*>(&Reserve)},
      {"cuMemAddressFree", reinterpret_cast<void*>(&FreeAddresses)},
      {"cuMemCreate", reinterpret_cast<void*>(&Create)},
      {"cuMemRelease", reinterpret_cast<void*>(&ReleaseHandle)},
      {"cuMemMap", reinterpret_cast<void*>(&Map)},
      {"cuMemUnmap", reinterpret_cast<void*>(&Unmap)},
      {"cuMemSetAccess", reinterpret_cast<void*>(&SetAccess)},
      {"cuMemGetAddressRange", reinterpret_cast<void*>(&AddressRange)},
      {"cuDeviceGet", reinterpret_cast<void*>(&DeviceGet)},
      {"cuDeviceGetUuid", reinterpret_cast<void*>(&DeviceUuid)}};
  return all;
}

}  // namespace

int64_t CountPhysical() {
  return static_cast<int64_t>(AllPhysical().size());
}

void ResetDriver() {
  AllPhysical().clear();
}

}  // namespace lrmoe::fake_cuda

using namespace lrmoe::fake_cuda;  // NOLINT: what follows is CUDA's own function

cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned version,
                                             unsigned long long flags,
                                             cudaDriverEntryPointQueryResult* result) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  if (flags != cudaEnableDefault) return Return(cudaErrorInvalidValue);
  // As CUDA 12 has them.
  if (version != 12000) Misuse("a driver function of another version than 12000");
  const auto failure = Its().failures.find(symbol);
  const auto found = Functions().find(symbol);
  const bool missing =
      found == Functions().end() || (failure != Its().failures.end() && failure->second.error == kMissing);
  *function = missing ? nullptr : found->second;
  *result = missing ? cudaDriverEntryPointSymbolNotFound : cudaDriverEntryPointSuccess;
  return cudaSuccess;
}
