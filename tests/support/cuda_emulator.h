// Runs CUDA kernels on the host, one block at a time, each thread a fiber: enough of the CUDA language for
// kernels/cuda, so that the kernels' own source runs under the sanitizers on a machine without a GPU. Blocks,
// and threads between two barriers, run in another order every time.
//
// What it checks: a barrier or warp operation that not all named threads reach, warp operations of different
// kinds or masks that meet, accesses outside the dynamic shared memory (with the address sanitizer), reads of
// shared memory that was never written (it starts as NaN patterns), results that depend on the order in which
// blocks or threads run. What it cannot show: races within one access, memory order, speed. Each thread of
// the program runs its own kernels.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>

#include "tests/support/stream_queue.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(threads)

struct dim3 {
  unsigned x = 1, y = 1, z = 1;
};

namespace lrmoe::emulator {

struct ThreadPlace {
  dim3 thread_idx, block_idx, block_dim, grid_dim;
};

// The running fiber's place. Only valid inside a kernel.
const ThreadPlace& Place();
void SyncThreads();
unsigned char* SharedBytes();

enum class WarpOperation : uint8_t { kShuffle, kBallot };
// Deposits `value`, waits for every lane of `mask`, and returns all 32 deposits (those outside the mask are
// 0).
const uint64_t* WarpExchange(WarpOperation operation, uint32_t mask, uint64_t value);
int Lane();

// Runs `thread` once per thread of the grid. Aborts with a message on misuse of barriers or warp operations.
void Run(unsigned blocks, unsigned threads, size_t shared_bytes, const std::function<void()>& thread);

// A kernel launch on a stream, a StreamQueue*; null: runs at once.
void Launch(void* stream, unsigned blocks, unsigned threads, size_t shared_bytes,
            const std::function<void()>& thread);

template <typename T>
uint64_t ToBits(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  return bits;
}
template <typename T>
T FromBits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace lrmoe::emulator

#define threadIdx (::lrmoe::emulator::Place().thread_idx)
#define blockIdx (::lrmoe::emulator::Place().block_idx)
#define blockDim (::lrmoe::emulator::Place().block_dim)
#define gridDim (::lrmoe::emulator::Place().grid_dim)

inline void __syncthreads() {
  ::lrmoe::emulator::SyncThreads();
}

template <typename T>
T __shfl_xor_sync(uint32_t mask, T value, int lane_mask) {
  using namespace ::lrmoe::emulator;
  const int source = Lane() ^ lane_mask;
  return FromBits<T>(WarpExchange(WarpOperation::kShuffle, mask, ToBits(value))[source]);
}

template <typename T>
T __shfl_up_sync(uint32_t mask, T value, int distance) {
  using namespace ::lrmoe::emulator;
  const int source = Lane() < distance ? Lane() : Lane() - distance;
  return FromBits<T>(WarpExchange(WarpOperation::kShuffle, mask, ToBits(value))[source]);
}

inline uint32_t __ballot_sync(uint32_t mask, int predicate) {
  using namespace ::lrmoe::emulator;
  const uint64_t* votes = WarpExchange(WarpOperation::kBallot, mask, predicate != 0);
  uint32_t ballot = 0;
  for (int lane = 0; lane < 32; ++lane)
    if (votes[lane]) ballot |= 1u << lane;
  return ballot;
}

// Fibers switch only at barriers and warp operations, so plain arithmetic is atomic here.
template <typename T>
T atomicAdd(T* address, T value) {
  const T old = *address;
  *address += value;
  return old;
}
template <typename T>
T atomicMin(T* address, T value) {
  const T old = *address;
  if (value < old) *address = value;
  return old;
}
template <typename T>
T atomicMax(T* address, T value) {
  const T old = *address;
  if (value > old) *address = value;
  return old;
}

inline int __popc(uint32_t value) {
  return __builtin_popcount(value);
}
inline uint32_t __float_as_uint(float value) {
  return ::lrmoe::emulator::FromBits<uint32_t>(::lrmoe::emulator::ToBits(value));
}
inline float __uint_as_float(uint32_t value) {
  return ::lrmoe::emulator::FromBits<float>(::lrmoe::emulator::ToBits(value));
}
