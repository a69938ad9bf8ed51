// Scores and the exact per-expert selection.
#include "kernels/cuda/start.cuh"

namespace lrmoe::kernels::cuda {
namespace {

__global__ void ScoreKernel(ScoreArgs args) {
  for (int64_t pair = FirstElement(); pair < args.num_pairs; pair += ElementStride()) {
    const float alpha = args.alpha[pair];
    const float score = alpha * alpha * args.gradient_norm2[pair / args.k] * args.phi_norm2[pair];
    args.score[args.position[pair]] = score;
    if ((__float_as_uint(score) & 0x7F800000u) == 0x7F800000u)  // NaN or infinite; the minimum needs no order
      atomicMin(args.bad_pair, static_cast<unsigned long long>(pair));
  }
}

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

// Bit pattern of the keep-th largest score and how many of those equal to it are kept. Non-negative floats
// order as their bit patterns, so four passes over 8-bit digits find it. 1 <= keep <= n.
struct Threshold {
  uint32_t bits;
  int64_t ties;
};
__device__ Threshold FindThreshold(const float* score, int64_t n, int64_t keep, uint32_t* histogram,
                                   int32_t* scalars) {
  uint32_t prefix = 0, prefix_mask = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    for (int bin = static_cast<int>(threadIdx.x); bin < 256; bin += static_cast<int>(blockDim.x))
      histogram[bin] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < n; i += blockDim.x) {
      const uint32_t bits = __float_as_uint(score[i]);
      if ((bits & prefix_mask) == prefix) atomicAdd(&histogram[(bits >> shift) & 0xFFu], 1u);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = 255;
      int64_t rest = keep;
      while (rest > histogram[digit]) rest -= histogram[digit--];
      scalars[0] = digit;
      scalars[1] = static_cast<int32_t>(rest);  // <= n <= 2^31 - 1
    }
    __syncthreads();
    prefix |= static_cast<uint32_t>(scalars[0]) << shift;
    prefix_mask |= 0xFFu << shift;
    keep = scalars[1];
    __syncthreads();
  }
  return {prefix, keep};
}

__global__ void __launch_bounds__(kSelectThreads) SelectKernel(SelectArgs args) {
  uint32_t* histogram = SharedMemory<uint32_t>();
  int32_t* counts = reinterpret_cast<int32_t*>(histogram + 256);
  const int64_t expert = blockIdx.x;
  const int64_t begin = args.offset[expert];
  const int64_t n = args.offset[expert + 1] - begin;
  const int64_t keep = args.kept_offset[expert + 1] - args.kept_offset[expert];
  const float* score = args.score + begin;

  Threshold threshold = {0, 0};
  const bool choose = keep > 0 && keep < n;
  if (choose) threshold = FindThreshold(score, n, keep, histogram, counts);

  int64_t ties_before = 0;
  int64_t kept_before = args.kept_offset[expert];
  for (int64_t start = 0; start < n; start += blockDim.x) {
    const int64_t i = start + threadIdx.x;
    const uint32_t bits = i < n ? __float_as_uint(score[i]) : 0;
    bool keep_this = i < n && keep > 0;
    if (choose) {
      const bool tie = i < n && bits == threshold.bits;
      const Rank rank = BlockRank(tie, counts);
      keep_this = i < n && (bits > threshold.bits || (tie && ties_before + rank.before < threshold.ties));
      ties_before += rank.total;
    }
    const Rank rank = BlockRank(keep_this, counts);
    if (i < n) args.kept[begin + i] = keep_this;
    if (keep_this) args.kept_index[kept_before + rank.before] = static_cast<int32_t>(begin + i);
    kept_before += rank.total;
  }
}

}  // namespace

absl::Status Score(Stream stream, const ScoreArgs& args) {
  if (absl::Status status = CheckSize("num_pairs", args.num_pairs); !status.ok()) return status;
  return Start(stream, ForElements(args.num_pairs), ScoreKernel, args);
}

absl::Status Select(Stream stream, const SelectArgs& args) {
  if (absl::Status status = CheckSize("num_experts", args.num_experts); !status.ok()) return status;
  return Start(stream, ForExperts(args.num_experts), SelectKernel, args);
}

}  // namespace lrmoe::kernels::cuda
