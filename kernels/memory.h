// Address ranges of one device's memory: reserved once, made usable piece by piece, so that what lies in them
// never moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lrmoe::kernels {

class Memory {
 public:
  virtual ~Memory() = default;  // gives addresses and memory back
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  // Aligned for any access of the device, at least to 64 bytes. The host may follow it only when the device
  // shares the host's memory.
  std::byte* base() const { return base_; }
  int64_t capacity() const { return capacity_; }  // bytes of addresses

  // Makes [0, end) usable, end <= capacity(); what was usable stays as it is. ResourceExhausted.
  virtual absl::Status Commit(int64_t end) = 0;

 protected:
  Memory() = default;
  std::byte* base_ = nullptr;
  int64_t capacity_ = 0;
};

// Host memory: pages appear on Commit. ResourceExhausted when the addresses cannot be had.
absl::StatusOr<std::unique_ptr<Memory>> ReserveHostMemory(int64_t bytes);

// Row i of rows[to.size()] of row_bytes each moves to place to[i]; `to` is a permutation. In place but for
// one row; afterwards to[i] == i.
void PermuteHostRows(int64_t row_bytes, std::span<int32_t> to, void* rows);

}  // namespace lrmoe::kernels
