#include "worker/engine/buffers.h"

#include <algorithm>
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
    arena_->Count(-size_);
    arena_->Give(data_ - arena_->memory_->base(), RoundUp(size_, kAlignment));
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
  arena_->Count(bytes - size_);
  if (held > kept) arena_->Give(data_ - arena_->memory_->base() + kept, held - kept);
  size_ = bytes;
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::Create(int64_t capacity_bytes, bool poison) {
  const int64_t capacity = RoundUp(std::max<int64_t>(capacity_bytes, kCommitStep), kCommitStep);
  LRMOE_ASSIGN_OR_RETURN(std::unique_ptr<kernels::Memory> memory, kernels::ReserveHostMemory(capacity));
  return std::unique_ptr<Arena>(new Arena(std::move(memory), nullptr, poison, nullptr));
}

absl::StatusOr<std::unique_ptr<Arena>> Arena::CreateOn(kernels::Device* device, int64_t capacity_bytes,
                                                       bool poison, Arena* counted_in) {
  const int64_t capacity = RoundUp(std::max<int64_t>(capacity_bytes, kCommitStep), kCommitStep);
  LRMOE_ASSIGN_OR_RETURN(std::unique_ptr<kernels::Memory> memory, device->Reserve(capacity));
  return std::unique_ptr<Arena>(new Arena(std::move(memory), device, poison, counted_in));
}

Arena::Arena(std::unique_ptr<kernels::Memory> memory, kernels::Device* device, bool poison, Arena* counted_in)
    : memory_(std::move(memory)), device_(device), poison_(poison), counted_in_(counted_in) {
  free_.reserve(256);
  free_.push_back({0, memory_->capacity()});
}

Arena::~Arena() {
  LRMOE_CHECK_EQ(in_use_, 0);
}

void Arena::Count(int64_t bytes) {
  for (Arena* arena = this; arena != nullptr; arena = arena->counted_in_) {
    arena->in_use_ += bytes;
    arena->peak_ = std::max(arena->peak_, arena->in_use_);
  }
}

absl::Status Arena::Commit(int64_t end) {
  if (end <= committed_) return absl::OkStatus();
  const int64_t target = std::min(memory_->capacity(), RoundUp(end, kCommitStep));
  LRMOE_RETURN_IF_ERROR(memory_->Commit(target));
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
                                                     in_use_, " of ", memory_->capacity(), " in use", why));
  };
  if (bytes > memory_->capacity()) return refuse("");
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
  out.data_ = memory_->base() + offset;
  out.size_ = bytes;
  Count(bytes);
  if (poison_ && device_ == nullptr) std::memset(out.data_, 0xFF, bytes);
  if (poison_ && device_ != nullptr) device_->Fill(out.data_, 0xFF, bytes);
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
