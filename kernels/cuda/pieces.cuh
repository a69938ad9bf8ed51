// Walking the pieces of a Cut (pair_passes.h), a warp for each.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/pair_passes.h"
#include "kernels/cuda/target.cuh"

namespace lrmoe::kernels::cuda {

// The last i < n with first[i] <= value; first[0] <= value, first ascends.
__device__ __forceinline__ int64_t LastNotAbove(const int64_t* first, int64_t n, int64_t value) {
  int64_t low = 0;
  for (int64_t high = n; high - low > 1;) {
    const int64_t middle = low + (high - low) / 2;
    if (first[middle] <= value)
      low = middle;
    else
      high = middle;
  }
  return low;
}

__device__ __forceinline__ int64_t EntriesOf(const Stretch& stretch) {
  return stretch.count;
}
__device__ __forceinline__ int64_t EntriesOf(const Range& range) {
  return range.count;
}
__device__ __forceinline__ int64_t EntriesOf(const WeightRule& rule) {
  return rule.range.count;
}

// Calls step(item, begin, end) for the pieces of this warp: entries [begin, end) of the item of that number.
template <typename Item, typename Step>
__device__ __forceinline__ void ForPieces(const Cut<Item>& cut, Step step) {
  for (int64_t piece = FirstRow(); piece < cut.num_pieces; piece += RowStride()) {
    const int64_t item = LastNotAbove(cut.first_piece, cut.num_items, piece);
    const int64_t begin = (piece - cut.first_piece[item]) * kPieceEntries;
    const int64_t entries = EntriesOf(cut.items[item]);
    step(item, begin, begin + kPieceEntries < entries ? begin + kPieceEntries : entries);
  }
}

// Calls step(item, i) for every entry i of those pieces that is this lane's.
template <typename Item, typename Step>
__device__ __forceinline__ void ForEntries(const Cut<Item>& cut, Step step) {
  ForPieces(cut, [&](int64_t number, int64_t begin, int64_t end) {
    const Item item = cut.items[number];
    for (int64_t i = begin + threadIdx.x % kWarpSize; i < end; i += kWarpSize) step(item, i);
  });
}

}  // namespace lrmoe::kernels::cuda
