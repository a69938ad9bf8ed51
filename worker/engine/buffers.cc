#include "worker/engine/buffers.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

constexpr int64_t kAlignment = 64;
// Pages are committed in steps: few system calls while a first step warms up, little waste at the end.
constexpr int64_t kCommitStep = int64_t{4} << 20;

int64_t RoundUp(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace

Buffer& Buffer::operator=(Buffer&& other) noexcept {
  if (this == &other) return *this;
  Release();
  arena_ = std::exchange(other.arena_, nullptr);
  data_ = std::exchange(other.data_, nullptr);
  size_ = std::exchange(other.size_, 0);
  return *this;
}

void Buffer::Release() {
  if (arena_ != nullptr) {
    arena_->in_use_ -= size_;
    arena_->Give(data_ - arena_->base_, RoundUp(size_, kAlignment));
  }
  arena_ = nullptr;
  data_ = nullptr;
  size_ = 0;
}

void Buffer::Shrink(int64_t bytes) {
  LRMOE_CHECK_LE(bytes, size_);
  if (bytes == 0) return Release();
  if (arena_ == nullptr) return;
  const int64_t kept = RoundUp(bytes, kAlignment);
  const int64_t held = RoundUp(size_, kAlignment);
  arena_->in_use_ -= size_ - bytes;
  if (held > kept) arena_->Give(data_ - arena_->base_ + kept, held - kept);
  size_ = bytes;
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(int64_t capacity_bytes, bool poison) {
  const int64_t capacity = RoundUp(std::max<int64_t>(capacity_bytes, kCommitStep), kCommitStep);
  void* base = mmap(nullptr, capacity, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    return absl::ResourceExhaustedError(
        absl::StrCat("cannot reserve ", capacity, " bytes of addresses for tensors: ", std::strerror(errno)));
  }
  // Rows are read in short pieces, pages apart. Pages are committed in whole steps anyway; without huge pages
  // all works as well.
  (void)madvise(base, capacity, MADV_HUGEPAGE);
  return std::unique_ptr<Arena>(new Arena(static_cast<std::byte*>(base), capacity, poison));
}

Arena::Arena(std::byte* base, int64_t capacity, bool poison)
    : base_(base), capacity_(capacity), poison_(poison) {
  free_.reserve(256);
  free_.push_back({0, capacity});
}

Arena::~Arena() {
  LRMOE_CHECK_EQ(in_use_, 0);
  munmap(base_, capacity_);
}

absl::Status Arena::Commit(int64_t end) {
  if (end <= committed_) return absl::OkStatus();
  const int64_t target = std::min(capacity_, RoundUp(end, kCommitStep));
  if (mprotect(base_ + committed_, target - committed_, PROT_READ | PROT_WRITE) != 0)
    return absl::ResourceExhaustedError(std::strerror(errno));
  committed_ = target;
  ++growths_;
  return absl::OkStatus();
}

absl::StatusOr<Buffer> Arena::Take(int64_t bytes, const char* what) {
  LRMOE_CHECK_GE(bytes, 0);
  Buffer out;
  if (bytes == 0) return out;
  const auto refuse = [&](absl::string_view why) {
    return absl::ResourceExhaustedError(absl::StrCat("no memory for ", what, ": ", bytes, " bytes wanted, ",
                                                     in_use_, " of ", capacity_, " in use", why));
  };
  if (bytes > capacity_) return refuse("");
  const int64_t size = RoundUp(bytes, kAlignment);
  auto best = free_.end();
  for (auto block = free_.begin(); block != free_.end(); ++block)
    if (block->size >= size && (best == free_.end() || block->size < best->size)) best = block;
  if (best == free_.end()) return refuse("");
  const int64_t offset = best->offset;
  if (absl::Status status = Commit(offset + size); !status.ok())
    return refuse(absl::StrCat(": ", std::string(status.message())));
  best->offset += size;
  best->size -= size;
  if (best->size == 0) free_.erase(best);
  out.arena_ = this;
  out.data_ = base_ + offset;
  out.size_ = bytes;
  in_use_ += bytes;
  peak_ = std::max(peak_, in_use_);
  if (poison_) std::memset(out.data_, 0xFF, bytes);
  return out;
}

void Arena::Give(int64_t offset, int64_t size) {
  auto next = std::lower_bound(free_.begin(), free_.end(), offset,
                               [](const Block& block, int64_t at) { return block.offset < at; });
  const bool joins_next = next != free_.end() && offset + size == next->offset;
  const bool joins_previous =
      next != free_.begin() && std::prev(next)->offset + std::prev(next)->size == offset;
  if (joins_previous && joins_next) {
    std::prev(next)->size += size + next->size;
    free_.erase(next);
  } else if (joins_previous) {
    std::prev(next)->size += size;
  } else if (joins_next) {
    next->offset = offset;
    next->size += size;
  } else {
    free_.insert(next, {offset, size});
  }
}

}  // namespace lrmoe::engine
