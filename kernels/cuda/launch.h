// Launch geometry: how many blocks of how many threads, and how much shared memory. Pure arithmetic on 64-bit
// sizes, so that it can be checked up to the largest supported shapes without a device.
#pragma once

#include <cstdint>

namespace lrmoe::kernels::cuda {

inline constexpr int64_t kThreadsPerBlock = 256;
inline constexpr int64_t kRowsPerBlock = kThreadsPerBlock / 32;  // a warp per row
// Grid-stride kernels gain nothing from more blocks than this (132 multiprocessors x 8 blocks x 8 waves,
// rounded up).
inline constexpr int64_t kMaxBlocks = 16384;

struct LaunchShape {
  uint32_t blocks = 0;  // 0: nothing to do, do not launch
  uint32_t threads = 0;
  uint32_t shared_bytes = 0;
};

constexpr LaunchShape ForRows(int64_t rows) {
  const int64_t blocks = (rows + kRowsPerBlock - 1) / kRowsPerBlock;
  return {static_cast<uint32_t>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreadsPerBlock, 0};
}

constexpr LaunchShape ForElements(int64_t elements) {
  const int64_t blocks = elements / kThreadsPerBlock + (elements % kThreadsPerBlock != 0);
  return {static_cast<uint32_t>(blocks < kMaxBlocks ? blocks : kMaxBlocks), kThreadsPerBlock, 0};
}

// Selection: one block per expert, 1024 threads, a histogram of 256 bins and a few scalars.
inline constexpr int64_t kSelectThreads = 1024;
inline constexpr uint32_t kSelectSharedBytes = 256 * 4 + 64 * 4;
constexpr LaunchShape ForExperts(int64_t experts) {
  return {static_cast<uint32_t>(experts), kSelectThreads, kSelectSharedBytes};
}

// Sums of squares: a fixed number of partial sums, whatever the device, so that the result does not depend on
// it.
inline constexpr int64_t kPartialSums = 1024;
constexpr LaunchShape ForPartialSums() {
  return {static_cast<uint32_t>(kPartialSums), kThreadsPerBlock,
          static_cast<uint32_t>(kThreadsPerBlock / 32 * 8)};
}

// Permuting rows in place goes in stretches of columns through scratch memory of at most this size, where
// rows are few enough for one 16-byte pack each to fit. Columns are 16-bit elements, a multiple of a pack or
// all.
inline constexpr int64_t kPermuteScratchBytes = int64_t{64} << 20;
constexpr int64_t PermutedColumns(int64_t width, int64_t num_rows) {
  const int64_t packs = num_rows == 0 ? width : kPermuteScratchBytes / 16 / num_rows;
  const int64_t columns = (packs < 1 ? 1 : packs) * 8;
  return columns < width ? columns : width;
}

}  // namespace lrmoe::kernels::cuda
