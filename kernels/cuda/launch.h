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

// Items of any size (stretches, ranges) are cut into pieces of this many entries, a warp for each.
inline constexpr int64_t kPieceEntries = 256;
constexpr int64_t PiecesOf(int64_t entries) {
  return entries / kPieceEntries + (entries % kPieceEntries != 0);
}

// A block per item whose threads agree on an order: an expert, a rule, a destination, a stretch of bits. Its
// shared memory: a histogram of 256 bins and 64 words, or sums of its warps.
inline constexpr int64_t kBlockThreads = 1024;
inline constexpr uint32_t kBlockSharedBytes = 256 * 4 + 64 * 4;
constexpr LaunchShape ForBlocks(int64_t items) {
  return {static_cast<uint32_t>(items), kBlockThreads, kBlockSharedBytes};
}

// Lists of which almost none needs a block's work: as many blocks as run at once look through them.
inline constexpr int64_t kMaxListBlocks = 1024;
constexpr LaunchShape ForLists(int64_t lists) {
  return {static_cast<uint32_t>(lists < kMaxListBlocks ? lists : kMaxListBlocks), kThreadsPerBlock,
          kBlockSharedBytes};
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
