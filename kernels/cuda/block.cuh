// What the threads of a block agree on: ranks in their order, running sums. Every thread of the block calls
// these.
#pragma once

#include "kernels/cuda/target.cuh"

namespace lrmoe::kernels::cuda {

// Number of set flags of the block's threads before this one, and of all of them. `counts`: one per warp.
struct Rank {
  int32_t before, total;
};
__device__ __forceinline__ Rank BlockRank(bool flag, int32_t* counts) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  const uint32_t ballot = __ballot_sync(kFullWarp, flag);
  if (lane == 0) counts[warp] = __popc(ballot);
  __syncthreads();
  Rank rank = {__popc(ballot & ((1u << lane) - 1u)), 0};
  for (int w = 0; w < static_cast<int>(blockDim.x) / kWarpSize; ++w) {
    if (w < warp) rank.before += counts[w];
    rank.total += counts[w];
  }
  __syncthreads();  // before the next use of `counts`
  return rank;
}

// Sum of the values of the block's threads before this one, and of all of them. `sums`: one per warp.
struct RunningSum {
  int64_t before, total;
};
__device__ __forceinline__ RunningSum BlockSum(int64_t value, int64_t* sums) {
  const int lane = static_cast<int>(threadIdx.x) % kWarpSize;
  const int warp = static_cast<int>(threadIdx.x) / kWarpSize;
  int64_t upto = value;
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int64_t lower = __shfl_up_sync(kFullWarp, upto, distance);
    if (lane >= distance) upto += lower;
  }
  if (lane == kWarpSize - 1) sums[warp] = upto;
  __syncthreads();
  RunningSum sum = {upto - value, 0};
  for (int w = 0; w < static_cast<int>(blockDim.x) / kWarpSize; ++w) {
    if (w < warp) sum.before += sums[w];
    sum.total += sums[w];
  }
  __syncthreads();  // before the next use of `sums`
  return sum;
}

// Bit patterns of non-negative floats order like the floats; the mask makes -0 equal to 0.
__device__ __forceinline__ uint32_t KeyOf(float score) {
  return __float_as_uint(score) & 0x7FFFFFFFu;
}

}  // namespace lrmoe::kernels::cuda
