// Scores of pairs, the exact selection per expert, and the weights of what it keeps.
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/pieces.cuh"
#include "kernels/cuda/start.cuh"
#include "kernels/draw.h"

namespace lrmoe::kernels::cuda {
namespace {

__device__ __forceinline__ float DrawOfPair(uint64_t seed, uint64_t first_pair, int64_t pair) {
  return DrawOf(seed, first_pair + static_cast<uint64_t>(pair));
}

// No sum follows a product but 1 - draw, which is exact: nothing that could be fused into other bits.
__device__ __forceinline__ float ScoreOf(const ScoreArgs& args, int64_t pair, int32_t position) {
  if (args.kind == ScoreKind::kDraw) return DrawOfPair(args.seed, args.first_pair, pair);
  const float value = args.token_value[pair / args.k];
  if (args.kind == ScoreKind::kToken) return value;
  const float alpha = args.alpha[pair];
  const float product = alpha * alpha * value * args.norm2[position];
  if (args.kind == ScoreKind::kProduct) return product;
  return sqrtf(product) / (1 - DrawOfPair(args.seed, args.first_pair, pair));
}

__global__ void ScoreKernel(ScoreArgs args, unsigned long long* bad_pair) {
  for (int64_t pair = FirstElement(); pair < args.num_pairs; pair += ElementStride()) {
    const int32_t position = args.position[pair];
    const float score = ScoreOf(args, pair, position);
    args.score[position] = score;
    if (KeyOf(score) >= 0x7F800000u)  // infinite or NaN; the minimum needs no order
      atomicMin(bad_pair, static_cast<unsigned long long>(pair));
  }
}

// Calls step(key) for this thread's share of the range's scores.
template <typename Step>
__device__ __forceinline__ void ForScores(const Range& range, const float* score, Step step) {
  for (int64_t i = threadIdx.x; i < range.count; i += blockDim.x) step(KeyOf(score[range.begin + i]));
}

// Key of the keep-th largest score of all ranges, and how many of those equal to it are kept. Four passes
// over digits of eight bits, from the exponent down; the last one sees a bit that is known again.
struct Threshold {
  uint32_t key;
  int32_t ties;
};
__device__ Threshold FindThreshold(const Range* ranges, int32_t num_ranges, const float* score, int64_t keep,
                                   uint32_t* histogram, int32_t* scalars) {
  uint32_t prefix = 0, known = 0;
  for (int shift = 23; shift >= 0; shift = shift == 7 ? 0 : shift - 8) {
    for (int bin = static_cast<int>(threadIdx.x); bin < 256; bin += static_cast<int>(blockDim.x))
      histogram[bin] = 0;
    __syncthreads();
    for (int32_t r = 0; r < num_ranges; ++r)
      ForScores(ranges[r], score, [&](uint32_t key) {
        if ((key & known) == prefix) atomicAdd(&histogram[(key >> shift) & 0xFFu], 1u);
      });
    __syncthreads();
    if (threadIdx.x == 0) {
      int digit = 255;
      int64_t rest = keep;
      while (digit > 0 && rest > histogram[digit]) rest -= histogram[digit--];
      scalars[0] = digit;
      scalars[1] = static_cast<int32_t>(rest);  // <= keep, below 2^31
    }
    __syncthreads();
    prefix |= static_cast<uint32_t>(scalars[0]) << shift;
    known |= 0xFFu << shift;
    keep = scalars[1];
    __syncthreads();
    if (shift == 0) break;
  }
  return {prefix, static_cast<int32_t>(keep)};
}

__global__ void __launch_bounds__(kBlockThreads)
    ThresholdKernel(ThresholdArgs args, const ScoredExpert* experts, const Range* all_ranges,
                    const int32_t* all_verdicts) {
  uint32_t* histogram = SharedMemory<uint32_t>();
  int32_t* scalars = reinterpret_cast<int32_t*>(histogram + 256);
  const ScoredExpert expert = experts[blockIdx.x];
  const Range* const ranges = all_ranges + expert.first_range;
  const int32_t* const verdict = all_verdicts + expert.first_range;
  const Threshold threshold =
      FindThreshold(ranges, expert.num_ranges, args.score, expert.quota, histogram, scalars);

  // Ties go to the first range; what is dropped may be one of them.
  int32_t* const equal_here = scalars;
  uint32_t* const largest_below = histogram;
  uint32_t below = 0;
  int32_t ties = threshold.ties, equal = 0;  // thread 0's
  if (threadIdx.x == 0) *equal_here = 0;
  if (threadIdx.x == 0) *largest_below = 0;
  for (int32_t r = 0; r < expert.num_ranges; ++r) {
    __syncthreads();
    int32_t mine = 0;
    ForScores(ranges[r], args.score, [&](uint32_t key) {
      mine += key == threshold.key;
      if (key < threshold.key && key > below) below = key;
    });
    if (mine > 0) atomicAdd(equal_here, mine);
    __syncthreads();
    if (threadIdx.x == 0) {
      const int32_t kept = *equal_here < ties ? *equal_here : ties;
      ties -= kept;
      equal += *equal_here;
      *equal_here = 0;
      args.verdicts[verdict[r]].threshold = __uint_as_float(threshold.key);
      args.verdicts[verdict[r]].ties = kept;
    }
  }
  if (below > 0) atomicMax(largest_below, below);
  __syncthreads();
  if (threadIdx.x == 0) *equal_here = equal;
  __syncthreads();
  const float dropped = __uint_as_float(*equal_here > threshold.ties ? threshold.key : *largest_below);
  for (int32_t r = static_cast<int32_t>(threadIdx.x); r < expert.num_ranges;
       r += static_cast<int32_t>(blockDim.x))
    args.verdicts[verdict[r]].dropped = dropped;
}

// The block's sum of `value` on thread 0, in one order. `sums`: one per warp.
__device__ double BlockTotal(double value, double* sums) {
  value = WarpSum(value);
  if (threadIdx.x % kWarpSize == 0) sums[threadIdx.x / kWarpSize] = value;
  __syncthreads();
  double total = 0;
  if (threadIdx.x == 0)
    for (int w = 0; w < static_cast<int>(blockDim.x) / kWarpSize; ++w) total += sums[w];
  __syncthreads();  // before the next use of `sums`
  return total;
}

// What the kernel takes of the spans of KeepArgs.
struct KeepArrays {
  const KeepRule* rules;
  const Range* ranges;
  int32_t* num_kept;
  double* total_score;  // null: not wanted
  double* kept_score;
};
__global__ void __launch_bounds__(kBlockThreads) KeepKernel(KeepArgs args, KeepArrays arrays) {
  double* sums = SharedMemory<double>();
  int32_t* counts = reinterpret_cast<int32_t*>(sums + kBlockThreads / kWarpSize);
  const KeepRule rule = arrays.rules[blockIdx.x];
  const bool choose = rule.verdict >= 0;
  const Verdict verdict = choose ? args.verdicts[rule.verdict] : Verdict{};
  const uint32_t threshold = KeyOf(verdict.threshold);
  int64_t ties_before = 0;
  for (int32_t r = rule.first_range; r < rule.first_range + rule.num_ranges; ++r) {
    const Range range = arrays.ranges[r];
    int64_t kept_before = range.begin;
    double total = 0, of_kept = 0;
    for (int64_t start = 0; start < range.count; start += blockDim.x) {
      const int64_t position = range.begin + start + threadIdx.x;
      const bool here = start + threadIdx.x < range.count;
      bool keep = here && rule.verdict == KeepRule::kAll;
      if (choose) {
        const uint32_t key = here ? KeyOf(args.score[position]) : 0;
        const bool tie = here && key == threshold;
        const Rank rank = BlockRank(tie, counts);
        keep = here && (key > threshold || (tie && ties_before + rank.before < verdict.ties));
        ties_before += rank.total;
      }
      const Rank rank = BlockRank(keep, counts);
      if (here) args.kept[position] = keep ? 1 : 0;
      if (keep) args.kept_pair[kept_before + rank.before] = args.pair[position];
      kept_before += rank.total;
      if (here && arrays.total_score != nullptr) {
        total += args.score[position];
        of_kept += keep ? args.score[position] : 0;
      }
    }
    if (threadIdx.x == 0) arrays.num_kept[r] = static_cast<int32_t>(kept_before - range.begin);
    if (arrays.total_score == nullptr) continue;
    total = BlockTotal(total, sums);
    of_kept = BlockTotal(of_kept, sums);
    if (threadIdx.x == 0) arrays.total_score[r] = total;
    if (threadIdx.x == 0) arrays.kept_score[r] = of_kept;
  }
}

__global__ void WeighKernel(WeighArgs args, Cut<WeightRule> rules) {
  ForEntries(rules, [&](const WeightRule& rule, int64_t i) {
    const int64_t position = rule.range.begin + i;
    if (args.kept != nullptr && args.kept[position] == 0) return;
    const int64_t pair = args.pair == nullptr ? position : args.pair[position];
    float weight = args.weight[pair];
    if (rule.verdict >= 0) {
      const float least = args.verdicts[rule.verdict].dropped;
      const float size = args.score[position] * (1 - DrawOfPair(args.seed, args.first_pair, pair));
      if (size < least) weight *= least / size;
    }
    args.weight[pair] = weight * rule.factor;
  });
}

}  // namespace

absl::Status ScorePairs(Stream stream, const ScoreArgs& args, unsigned long long* bad_pair) {
  if (absl::Status status = CheckSize("num_pairs", args.num_pairs); !status.ok()) return status;
  return Start(stream, ForElements(args.num_pairs), ScoreKernel, args, bad_pair);
}

absl::Status FindThresholds(Stream stream, const ThresholdArgs& args) {
  return Start(stream, ForBlocks(static_cast<int64_t>(args.experts.size())), ThresholdKernel, args,
               args.experts.data(), args.ranges.data(), args.verdict.data());
}

absl::Status KeepPairs(Stream stream, const KeepArgs& args) {
  const KeepArrays arrays = {args.rules.data(), args.ranges.data(), args.num_kept.data(),
                             args.total_score.empty() ? nullptr : args.total_score.data(),
                             args.kept_score.data()};
  return Start(stream, ForBlocks(static_cast<int64_t>(args.rules.size())), KeepKernel, args, arrays);
}

absl::Status WeighPairs(Stream stream, const WeighArgs& args, const Cut<WeightRule>& rules) {
  return Start(stream, ForRows(rules.num_pieces), WeighKernel, args, rules);
}

}  // namespace lrmoe::kernels::cuda
