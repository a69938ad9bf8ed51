#include "kernels/memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/kernels.h"
#include "kernels/precondition.h"

namespace lrmoe::kernels {
namespace {

class HostMemory : public Memory {
 public:
  HostMemory(std::byte* base, int64_t capacity) {
    base_ = base;
    capacity_ = capacity;
  }
  ~HostMemory() override { munmap(base_, capacity_); }

  absl::Status Commit(int64_t end) override {
    if (mprotect(base_, end, PROT_READ | PROT_WRITE) == 0) return absl::OkStatus();
    return absl::ResourceExhaustedError(std::strerror(errno));
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<Memory>> ReserveHostMemory(int64_t bytes) {
  void* base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot reserve ", bytes, " bytes of addresses for tensors: ", std::strerror(errno)));
  }
  // Rows are read in short pieces, pages apart. Without huge pages all works as well.
  (void)madvise(base, bytes, MADV_HUGEPAGE);
  return std::make_unique<HostMemory>(static_cast<std::byte*>(base), bytes);
}

void PermuteHostRows(int64_t row_bytes, std::span<int32_t> to, void* rows) {
  auto* const base = static_cast<std::byte*>(rows);
  std::vector<std::byte> held(row_bytes);
  for (size_t start = 0; start < to.size(); ++start) {
    // Follows the cycle through `start`: the held row goes to its place, what was there is held next.
    if (to[start] == static_cast<int32_t>(start)) continue;
    std::memcpy(held.data(), base + static_cast<int64_t>(start) * row_bytes, row_bytes);
    size_t at = start;
    do {
      const auto next = static_cast<size_t>(to[at]);
      std::swap_ranges(held.begin(), held.end(), base + static_cast<int64_t>(next) * row_bytes);
      to[at] = static_cast<int32_t>(at);
      at = next;
    } while (at != start);
  }
}

absl::StatusOr<std::unique_ptr<Memory>> Device::Reserve(int64_t bytes) {
  return ReserveHostMemory(bytes);
}

absl::StatusOr<std::unique_ptr<Memory>> Device::AllocatePinned(int64_t bytes) {
  absl::StatusOr<std::unique_ptr<Memory>> memory = ReserveHostMemory(bytes);
  if (!memory.ok()) return memory;
  if (absl::Status status = (*memory)->Commit(bytes); !status.ok()) return status;
  return memory;
}

void Device::Upload(void* dst, const void* src, int64_t bytes) {
  if (bytes > 0) std::memcpy(dst, src, bytes);
}

void Device::Download(void* dst, const void* src, int64_t bytes) {
  if (bytes > 0) std::memcpy(dst, src, bytes);
}

void Device::Copy(void* dst, const void* src, int64_t bytes) {
  if (bytes > 0) std::memcpy(dst, src, bytes);
}

void Device::Fill(void* dst, uint8_t value, int64_t bytes) {
  if (bytes > 0) std::memset(dst, value, bytes);
}

void Device::PermuteRows(int64_t row_bytes, std::span<int32_t> to, void* rows) {
  PermuteHostRows(row_bytes, to, rows);
}

// A device that packs no weights.
void Device::PackWeights(GemmKind, Type, int64_t, int64_t, const void*, void*) {
  LRMOE_KERNELS_REQUIRE(!"this device packs weights");
}
void Device::UnpackWeights(Type, int64_t, int64_t, const void*, void*) {
  LRMOE_KERNELS_REQUIRE(!"this device packs weights");
}
void Device::RepackWeights(Type, int64_t, int64_t, const void*, void*) {
  LRMOE_KERNELS_REQUIRE(!"this device packs weights");
}

}  // namespace lrmoe::kernels
