// Index arrays of pairs: gathered, inverted, copied in stretches, packed for the way, grouped by key.
#include "kernels/cuda/block.cuh"
#include "kernels/cuda/pieces.cuh"
#include "kernels/cuda/start.cuh"

namespace lrmoe::kernels::cuda {
namespace {

__global__ void GatherWordsKernel(int64_t n, const int32_t* index, const uint32_t* src, uint32_t* dst) {
  for (int64_t i = FirstElement(); i < n; i += ElementStride()) dst[i] = src[index[i]];
}

__global__ void ScatterWordsKernel(int64_t n, const int32_t* index, const uint32_t* src, uint32_t* dst) {
  for (int64_t i = FirstElement(); i < n; i += ElementStride()) dst[index[i]] = src[i];
}

__global__ void InvertKernel(int64_t n, const int32_t* index, int32_t* dst) {
  for (int64_t i = FirstElement(); i < n; i += ElementStride()) dst[index[i]] = static_cast<int32_t>(i);
}

__global__ void CopyKernel(Cut<Stretch> stretches, const uint32_t* src, uint32_t* dst) {
  ForEntries(stretches, [&](const Stretch& s, int64_t i) {
    dst[s.to + i] = src[s.from + i] + static_cast<uint32_t>(s.add);
  });
}

__global__ void CountKernel(Cut<Stretch> stretches, int32_t* dst) {
  ForEntries(stretches,
             [&](const Stretch& s, int64_t i) { dst[s.to + i] = static_cast<int32_t>(s.from + s.add + i); });
}

__global__ void CountRepeatedKernel(int64_t n, int32_t times, int32_t* dst) {
  for (int64_t i = FirstElement(); i < n; i += ElementStride()) dst[i] = static_cast<int32_t>(i / times);
}

__global__ void MaxKernel(Cut<Range> ranges, const int32_t* src, int32_t* largest) {
  ForPieces(ranges, [&](int64_t range, int64_t begin, int64_t end) {
    const int32_t* const values = src + ranges.items[range].begin;
    int32_t most = -1;
    for (int64_t i = begin + threadIdx.x % kWarpSize; i < end; i += kWarpSize)
      most = values[i] > most ? values[i] : most;
    for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
      const int32_t other = __shfl_xor_sync(kFullWarp, most, distance);
      most = other > most ? other : most;
    }
    if (threadIdx.x % kWarpSize == 0) atomicMax(&largest[range], most);
  });
}

__global__ void MarkDestinationsKernel(PayloadArgs args, const int64_t* first_pair, int64_t destinations) {
  const int64_t n = first_pair[destinations];
  for (int64_t i = FirstElement(); i < n; i += ElementStride())
    args.destination[args.sent_pair[i]] = static_cast<int32_t>(LastNotAbove(first_pair, destinations, i));
}

// A block per destination walks all tokens and keeps those that have a pair which goes there.
__global__ void __launch_bounds__(kBlockThreads)
    PackPayloadKernel(PayloadArgs args, const int64_t* first_pair, int32_t* rows) {
  int32_t* counts = SharedMemory<int32_t>();
  const auto here = static_cast<int32_t>(blockIdx.x);
  int32_t* const list = args.token + first_pair[here];
  const bool any = first_pair[here + 1] > first_pair[here];
  int32_t listed = 0;
  for (int64_t start = 0; any && start < args.num_tokens; start += blockDim.x) {
    const int64_t token = start + threadIdx.x;
    bool travels = false;
    if (token < args.num_tokens)
      for (int64_t pair = token * args.k; pair < (token + 1) * args.k; ++pair)
        travels = travels || args.destination[pair] == here;
    const Rank rank = BlockRank(travels, counts);
    if (travels) {
      const int32_t row = listed + rank.before;
      list[row] = static_cast<int32_t>(token);
      for (int64_t pair = token * args.k; pair < (token + 1) * args.k; ++pair)
        if (args.destination[pair] == here) args.pair_row[pair] = row;
    }
    listed += rank.total;
  }
  if (threadIdx.x == 0) rows[here] = listed;
}

// A lane packs a byte: kPieceEntries marks make one for each lane of the warp.
static_assert(kPieceEntries == int64_t{kWarpSize} * 8);
__global__ void PackBitsKernel(Cut<Stretch> stretches, const uint8_t* marks, uint8_t* bits) {
  ForPieces(stretches, [&](int64_t number, int64_t begin, int64_t end) {
    const Stretch stretch = stretches.items[number];
    begin += int64_t{threadIdx.x % kWarpSize} * 8;
    if (begin >= end) return;
    uint32_t byte = 0;
    for (int64_t i = begin; i < end && i < begin + 8; ++i)
      byte |= static_cast<uint32_t>(marks[stretch.from + i]) << (i - begin);
    bits[stretch.to + begin / 8] = static_cast<uint8_t>(byte);
  });
}

__global__ void __launch_bounds__(kBlockThreads)
    UnpackBitsKernel(const Stretch* stretches, const uint8_t* bits, int32_t* index) {
  int32_t* counts = SharedMemory<int32_t>();
  const Stretch stretch = stretches[blockIdx.x];
  int64_t next = stretch.to;
  for (int64_t start = 0; start < stretch.count; start += blockDim.x) {
    const int64_t i = start + threadIdx.x;
    const bool set = i < stretch.count && ((bits[stretch.from + i / 8] >> (i % 8)) & 1) != 0;
    const Rank rank = BlockRank(set, counts);
    if (set) index[next + rank.before] = static_cast<int32_t>(stretch.add + i);
    next += rank.total;
  }
}

// Groups by key as the host does: counted two places on, an entry of `offset` is its key's first place while
// the items are listed and the next key's afterwards. For atomics it is unsigned.
using Counter = unsigned long long;

__global__ void CountKeysKernel(int64_t n, const int32_t* keys, Counter* offset) {
  for (int64_t i = FirstElement(); i < n; i += ElementStride())
    atomicAdd(&offset[int64_t{keys[i]} + 2], Counter{1});
}

// values[i] becomes the sum of those up to i, by one block.
__global__ void __launch_bounds__(kBlockThreads) RunningSumKernel(int64_t n, int64_t* values) {
  constexpr int kEach = 4;
  int64_t* sums = SharedMemory<int64_t>();
  int64_t before = 0;
  for (int64_t start = 0; start < n; start += int64_t{blockDim.x} * kEach) {
    const int64_t first = start + int64_t{threadIdx.x} * kEach;
    int64_t upto[kEach], last = 0;
    for (int j = 0; j < kEach; ++j) {
      if (first + j < n) last += values[first + j];
      upto[j] = last;
    }
    const RunningSum sum = BlockSum(last, sums);
    for (int j = 0; j < kEach; ++j)
      if (first + j < n) values[first + j] = before + sum.before + upto[j];
    before += sum.total;
  }
}

__global__ void ListKernel(int64_t n, const int32_t* keys, Counter* offset, int32_t* index) {
  for (int64_t i = FirstElement(); i < n; i += ElementStride())
    index[atomicAdd(&offset[int64_t{keys[i]} + 1], Counter{1})] = static_cast<int32_t>(i);
}

// Atomics listed the items of a key in any order. Almost all lists are short: a thread sorts each.
constexpr int64_t kShortList = 32;
__global__ void SortShortKernel(int64_t num_keys, const int64_t* offset, int32_t* index) {
  for (int64_t key = FirstElement(); key < num_keys; key += ElementStride()) {
    const int64_t begin = offset[key], end = offset[key + 1];
    if (end - begin > kShortList) continue;
    for (int64_t sorted = begin + 1; sorted < end; ++sorted) {
      const int32_t item = index[sorted];
      int64_t place = sorted;
      for (; place > begin && index[place - 1] > item; --place) index[place] = index[place - 1];
      index[place] = item;
    }
  }
}

// A block lists the items of a long one again, in order, from all keys.
__global__ void ListLongKernel(int64_t n, const int32_t* keys, int64_t num_keys, const int64_t* offset,
                               int32_t* index) {
  int32_t* counts = SharedMemory<int32_t>();
  for (int64_t key = blockIdx.x; key < num_keys; key += gridDim.x) {
    int64_t next = offset[key];
    const int64_t end = offset[key + 1];
    if (end - next <= kShortList) continue;
    for (int64_t start = 0; start < n && next < end; start += blockDim.x) {
      const int64_t i = start + threadIdx.x;
      const bool mine = i < n && keys[i] == key;
      const Rank rank = BlockRank(mine, counts);
      if (mine) index[next + rank.before] = static_cast<int32_t>(i);
      next += rank.total;
    }
  }
}

}  // namespace

absl::Status GatherWords(Stream stream, int64_t n, const int32_t* index, const void* src, void* dst) {
  if (absl::Status status = CheckSize("n", n); !status.ok()) return status;
  return Start(stream, ForElements(n), GatherWordsKernel, n, index, static_cast<const uint32_t*>(src),
               static_cast<uint32_t*>(dst));
}

absl::Status ScatterWords(Stream stream, int64_t n, const int32_t* index, const void* src, void* dst) {
  if (absl::Status status = CheckSize("n", n); !status.ok()) return status;
  return Start(stream, ForElements(n), ScatterWordsKernel, n, index, static_cast<const uint32_t*>(src),
               static_cast<uint32_t*>(dst));
}

absl::Status Invert(Stream stream, int64_t n, const int32_t* index, int32_t* dst) {
  if (absl::Status status = CheckSize("n", n); !status.ok()) return status;
  return Start(stream, ForElements(n), InvertKernel, n, index, dst);
}

absl::Status CopyStretches(Stream stream, const Cut<Stretch>& stretches, const void* src, void* dst) {
  return Start(stream, ForRows(stretches.num_pieces), CopyKernel, stretches,
               static_cast<const uint32_t*>(src), static_cast<uint32_t*>(dst));
}

absl::Status CountStretches(Stream stream, const Cut<Stretch>& stretches, int32_t* dst) {
  return Start(stream, ForRows(stretches.num_pieces), CountKernel, stretches, dst);
}

absl::Status CountRepeated(Stream stream, int64_t n, int32_t times, int32_t* dst) {
  if (absl::Status status = CheckSize("n", n); !status.ok()) return status;
  return Start(stream, ForElements(n), CountRepeatedKernel, n, times, dst);
}

absl::Status MaxOfRanges(Stream stream, const Cut<Range>& ranges, const int32_t* src, int32_t* largest) {
  return Start(stream, ForRows(ranges.num_pieces), MaxKernel, ranges, src, largest);
}

absl::Status PackPayload(Stream stream, const PayloadArgs& args, std::span<const int64_t> first_pair) {
  if (absl::Status status = CheckSize("num_tokens", args.num_tokens); !status.ok()) return status;
  const int64_t destinations = static_cast<int64_t>(first_pair.size()) - 1;
  // As many pairs travel as there are at most.
  absl::Status status = Start(stream, ForElements(args.num_tokens * args.k), MarkDestinationsKernel, args,
                              first_pair.data(), destinations);
  if (!status.ok()) return status;
  return Start(stream, ForBlocks(destinations), PackPayloadKernel, args, first_pair.data(), args.rows.data());
}

absl::Status PackBits(Stream stream, const Cut<Stretch>& stretches, const uint8_t* marks, uint8_t* bits) {
  return Start(stream, ForRows(stretches.num_pieces), PackBitsKernel, stretches, marks, bits);
}

absl::Status UnpackBits(Stream stream, std::span<const Stretch> stretches, const uint8_t* bits,
                        int32_t* index) {
  return Start(stream, ForBlocks(static_cast<int64_t>(stretches.size())), UnpackBitsKernel, stretches.data(),
               bits, index);
}

absl::Status GroupByKey(Stream stream, int64_t n, const int32_t* keys, int64_t num_keys, int64_t* offset,
                        int32_t* index) {
  if (absl::Status status = CheckSize("n", n); !status.ok()) return status;
  if (absl::Status status = CheckSize("num_keys", num_keys); !status.ok()) return status;
  auto* const counters = reinterpret_cast<Counter*>(offset);
  if (absl::Status status = Start(stream, ForElements(n), CountKeysKernel, n, keys, counters); !status.ok())
    return status;
  if (absl::Status status = Start(stream, ForBlocks(1), RunningSumKernel, num_keys + 2, offset); !status.ok())
    return status;
  if (absl::Status status = Start(stream, ForElements(n), ListKernel, n, keys, counters, index); !status.ok())
    return status;
  if (absl::Status status = Start(stream, ForElements(num_keys), SortShortKernel, num_keys, offset, index);
      !status.ok())
    return status;
  return Start(stream, ForLists(num_keys), ListLongKernel, n, keys, num_keys, offset, index);
}

}  // namespace lrmoe::kernels::cuda
