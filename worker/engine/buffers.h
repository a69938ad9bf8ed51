// The memory of tensors: one arena per engine, and a second one for rows when the device has its own memory.
// Addresses are reserved once, pages are committed as the high-water mark rises and kept, so that a step that
// needs no more than an earlier one allocates nothing. Bytes are counted as the memory model counts them
// (common/memory_model.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/kernels.h"

namespace lrmoe::engine {

class Arena;

// A block of an arena, 64-byte aligned. Contents are unspecified when taken. The arena outlives it.
class Buffer {
 public:
  Buffer() = default;
  Buffer(Buffer&& other) noexcept { *this = std::move(other); }
  Buffer& operator=(Buffer&& other) noexcept;
  ~Buffer() { Release(); }

  // Gives the block back. Idempotent.
  void Release();
  // Gives the tail back: the block becomes `bytes` long, bytes <= size().
  void Shrink(int64_t bytes);

  std::byte* data() const { return data_; }
  int64_t size() const { return size_; }
  std::span<std::byte> bytes() const { return {data_, static_cast<size_t>(size_)}; }
  // The block as elements of T; its size must be a multiple.
  template <typename T>
  std::span<T> as() const {
    return {reinterpret_cast<T*>(data_), static_cast<size_t>(size_) / sizeof(T)};
  }

 private:
  friend class Arena;
  Arena* arena_ = nullptr;
  std::byte* data_ = nullptr;
  int64_t size_ = 0;
};

// Not thread-safe.
class Arena {
 public:
  // Reserves `capacity_bytes` of addresses (rounded up to pages). ResourceExhausted when that is impossible.
  // poison: every block taken is filled with 0xFF (NaN in bf16 and fp32, -1 in integers), for tests.
  static absl::StatusOr<std::unique_ptr<Arena>> Create(int64_t capacity_bytes, bool poison);
  // The same in the memory of `device`, which outlives it. Blocks are counted in `counted_in`, which outlives
  // it too; only what is called on `device` may follow their addresses. They may be given back while the
  // device still works on them: what it is told next comes later.
  static absl::StatusOr<std::unique_ptr<Arena>> CreateOn(kernels::Device* device, int64_t capacity_bytes,
                                                         bool poison, Arena* counted_in);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  // Best fit. ResourceExhausted, naming `what`, the bytes asked for and those in use, when it does not fit.
  absl::StatusOr<Buffer> Take(int64_t bytes, const char* what);

  // Of this arena and those counted in it.
  int64_t bytes_in_use() const { return in_use_; }
  // Most bytes in use since the last MarkPeak.
  int64_t peak_bytes() const { return peak_; }
  void MarkPeak() { peak_ = in_use_; }
  // Times that pages had to be committed: constant in a steady state.
  int64_t growths() const { return growths_; }

 private:
  friend class Buffer;
  struct Block {
    int64_t offset, size;
  };
  Arena(std::unique_ptr<kernels::Memory> memory, kernels::Device* device, bool poison, Arena* counted_in);
  void Give(int64_t offset, int64_t size);
  void Count(int64_t bytes);  // more, or fewer, in use
  absl::Status Commit(int64_t end);

  std::unique_ptr<kernels::Memory> memory_;
  kernels::Device* device_;  // null: host memory
  bool poison_;
  Arena* counted_in_;  // or null
  int64_t committed_ = 0;
  int64_t in_use_ = 0;
  int64_t peak_ = 0;
  int64_t growths_ = 0;
  std::vector<Block> free_;  // by offset, never adjacent; the last one reaches to capacity_
};

}  // namespace lrmoe::engine
