// Memory of devices, closed to the host but while streams run, and pinned memory.
#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "tests/support/fake_cuda/state.h"

namespace lrmoe::fake_cuda {
namespace {

constexpr int64_t kPage = 4096;

int64_t Pages(int64_t bytes) {
  return (std::max<int64_t>(bytes, 1) + kPage - 1) / kPage * kPage;
}

bool Usable(const Block& block) {
  return block.kind != Kind::kPinned && block.accessible;
}

// How the ends of a copy lie: where a direction is named as it says, and on the stream's device.
void CheckCopy(void* dst, const void* src, int64_t bytes, cudaMemcpyKind kind, int device) {
  const bool to_device = OnDevice(dst, bytes, "a copy's destination");
  const bool from_device = OnDevice(src, bytes, "a copy's source");
  if (kind == cudaMemcpyDefault) return;
  if (to_device != (kind == cudaMemcpyHostToDevice || kind == cudaMemcpyDeviceToDevice))
    Misuse("a copy's destination is not where it says");
  if (from_device != (kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyDeviceToDevice))
    Misuse("a copy's source is not where it says");
  if (to_device) ExpectOnDevice(dst, bytes, device, "a copy's destination");
  if (from_device) ExpectOnDevice(src, bytes, device, "a copy's source");
}

}  // namespace

void Protect(const Block& block) {
  if (block.kind == Kind::kPinned) return;
  const int rights = Its().open && block.accessible ? PROT_READ | PROT_WRITE : PROT_NONE;
  if (mprotect(block.base, block.mapped, rights) != 0) Misuse("mprotect failed");
}

Access::Access() {
  ++Its().waiting;
}
Access::~Access() {
  if (--Its().waiting > 0 || !std::exchange(Its().open, false)) return;
  for (const auto& [_, block] : Its().blocks) Protect(block);
}
void Touch() {
  if (Its().waiting == 0) Misuse("a step runs outside of Access");
  if (std::exchange(Its().open, true)) return;
  for (const auto& [_, block] : Its().blocks) Protect(block);
}

Block* Find(const void* pointer) {
  const auto* at = static_cast<const std::byte*>(pointer);
  auto next = Its().blocks.upper_bound(at);
  if (next == Its().blocks.begin()) return nullptr;
  Block& block = std::prev(next)->second;
  return at < block.base + block.bytes ? &block : nullptr;
}

bool OnDevice(const void* pointer, int64_t bytes, const char* what) {
  const auto* at = static_cast<const std::byte*>(pointer);
  const std::byte* const end = at + bytes;
  const Block* block = Find(at);
  if (block == nullptr || block->kind == Kind::kPinned) return false;
  // Pieces of a reserved range follow each other.
  for (; at < end; at = block->base + block->bytes) {
    block = Find(at);
    if (block == nullptr || !Usable(*block)) Misuse(std::string(what) + " ends beyond the device's memory");
  }
  return true;
}

void ExpectOnDevice(const void* pointer, int64_t bytes, int device, const std::string& what) {
  if (bytes > 0 && (!OnDevice(pointer, bytes, what.c_str()) || Find(pointer)->device != device))
    Misuse(what + " is not in the device's memory");
}

void AddBlock(const Block& block) {
  // Of large ones the beginning: pages that are there take their time whenever memory is opened and closed.
  constexpr int64_t kPoisoned = int64_t{256} << 10;
  if (mprotect(block.base, block.mapped, PROT_READ | PROT_WRITE) != 0) Misuse("mprotect failed");
  if (block.kind != Kind::kOpened) std::memset(block.base, 0xFF, std::min(block.mapped, kPoisoned));
  Its().blocks[block.base] = block;
  Protect(block);
}

bool Allocate(int64_t bytes, int device, Kind kind, std::byte** base) {
  Block block{.bytes = bytes, .mapped = Pages(bytes), .device = device, .kind = kind};
  int64_t& used = Its().used_bytes[kind == Kind::kPinned ? -1 : device];
  if (kind != Kind::kPinned && used + block.mapped > Its().memory_bytes) return false;
  void* const at = mmap(nullptr, block.mapped + kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                        -1, 0);  // and a page behind it that stays closed
  if (at == MAP_FAILED) return false;
  used += block.mapped;
  *base = block.base = static_cast<std::byte*>(at);
  AddBlock(block);
  return true;
}

void Release(std::byte* base) {
  const Block block = Its().blocks.at(base);
  Its().blocks.erase(base);
  Its().used_bytes[block.kind == Kind::kPinned ? -1 : block.device] -= block.mapped;
  munmap(base, block.mapped + kPage);
}

}  // namespace lrmoe::fake_cuda

using namespace lrmoe::fake_cuda;  // NOLINT: what follows are CUDA's own functions

cudaError_t cudaMalloc(void** pointer, size_t bytes) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  if (bytes == 0) return *pointer = nullptr, cudaSuccess;
  const bool had = Allocate(static_cast<int64_t>(bytes), CurrentDevice(), Kind::kMalloc,
                            reinterpret_cast<std::byte**>(pointer));
  return Return(had ? cudaSuccess : cudaErrorMemoryAllocation);
}

cudaError_t cudaMallocAsync(void** pointer, size_t bytes, cudaStream_t stream) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  const bool had = Allocate(static_cast<int64_t>(bytes), Known(stream, __func__).device, Kind::kPool,
                            reinterpret_cast<std::byte**>(pointer));
  return Return(had ? cudaSuccess : cudaErrorMemoryAllocation);
}

// Waits for the device.
cudaError_t cudaFree(void* pointer) {
  Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  if (pointer == nullptr) return cudaSuccess;
  const Block* const block = Find(pointer);
  if (block == nullptr || block->base != pointer || block->kind != Kind::kMalloc)
    Misuse("cudaFree of what cudaMalloc did not give");
  FinishDevice(block->device, lock, __func__);
  Release(static_cast<std::byte*>(pointer));
  return cudaSuccess;
}

cudaError_t cudaFreeAsync(void* pointer, cudaStream_t stream) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  const Block* const block = Find(pointer);
  if (block == nullptr || block->base != pointer || block->kind != Kind::kPool)
    Misuse("cudaFreeAsync of what cudaMallocAsync did not give");
  Enqueue(Known(stream, __func__), [pointer] {
    Release(static_cast<std::byte*>(pointer));
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  if ((flags & ~unsigned{cudaHostAllocPortable}) != 0) Misuse("mapped pinned memory; not in this fake");
  const bool had = Allocate(static_cast<int64_t>(bytes), CurrentDevice(), Kind::kPinned,
                            reinterpret_cast<std::byte**>(pointer));
  return Return(had ? cudaSuccess : cudaErrorMemoryAllocation);
}

// Does not wait for copies; those that still use it find it gone.
cudaError_t cudaFreeHost(void* pointer) {
  const Lock lock(Mutex());
  const Block* const block = Find(pointer);
  if (block == nullptr || block->base != pointer || block->kind != Kind::kPinned)
    Misuse("cudaFreeHost of what cudaHostAlloc did not give");
  Release(static_cast<std::byte*>(pointer));
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* dst, const void* src, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  Stream& on = Known(stream, __func__);
  if (bytes == 0) return cudaSuccess;
  CheckCopy(dst, src, static_cast<int64_t>(bytes), kind, on.device);
  if (Find(src) == nullptr) {  // pageable: read before the call returns
    const auto* from = static_cast<const std::byte*>(src);
    Enqueue(on, [dst, staged = std::vector<std::byte>(from, from + bytes)] {
      Touch();
      std::memcpy(dst, staged.data(), staged.size());
      return true;
    });
    return cudaSuccess;
  }
  Enqueue(on, [=] {
    Touch();
    std::memcpy(dst, src, bytes);
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* dst, int value, size_t bytes, cudaStream_t stream) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  Stream& on = Known(stream, __func__);
  ExpectOnDevice(dst, static_cast<int64_t>(bytes), on.device, "what is filled");
  Enqueue(on, [=] {
    Touch();
    std::memset(dst, value, bytes);
    return true;
  });
  return cudaSuccess;
}

cudaError_t cudaPointerGetAttributes(cudaPointerAttributes* attributes, const void* pointer) {
  const Lock lock(Mutex());
  if (const cudaError_t error = Enter(__func__); error != cudaSuccess) return Return(error);
  *attributes = {};
  const Block* const block = Find(pointer);
  attributes->device = block != nullptr ? block->device : cudaInvalidDeviceId;
  attributes->type = block == nullptr               ? cudaMemoryTypeUnregistered
                     : block->kind == Kind::kPinned ? cudaMemoryTypeHost
                                                    : cudaMemoryTypeDevice;
  return cudaSuccess;
}
