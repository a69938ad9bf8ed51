// The pair operations of kernels/pairs.h as CUDA kernels, enqueued as those of passes.h, with the same
// errors. Arguments are those of pairs.h, but here every pointer and every span is device memory; scratch
// that the host version wants and kernels do not is not looked at.
//
// Deterministic: integer atomics only, and where their order shows, what they gave is put in order.
#pragma once

#include <cstdint>
#include <span>

#include "absl/status/status.h"
#include "kernels/cuda/passes.h"
#include "kernels/pairs.h"

namespace lrmoe::kernels::cuda {

// Items of any number of entries each, many small ones or few large ones, cut into pieces of kPieceEntries
// (launch.h), so that warps share them evenly.
template <typename Item>
struct Cut {
  const Item* items = nullptr;           // [num_items]
  const int64_t* first_piece = nullptr;  // [num_items + 1]: pieces of the items before
  int64_t num_items = 0, num_pieces = 0;
};

absl::Status GatherWords(Stream stream, int64_t n, const int32_t* index, const void* src, void* dst);
absl::Status ScatterWords(Stream stream, int64_t n, const int32_t* index, const void* src, void* dst);
absl::Status Invert(Stream stream, int64_t n, const int32_t* index, int32_t* dst);
absl::Status CopyStretches(Stream stream, const Cut<Stretch>& stretches, const void* src, void* dst);
absl::Status CountStretches(Stream stream, const Cut<Stretch>& stretches, int32_t* dst);
absl::Status CountRepeated(Stream stream, int64_t n, int32_t times, int32_t* dst);
// largest[ranges] is -1 before.
absl::Status MaxOfRanges(Stream stream, const Cut<Range>& ranges, const int32_t* src, int32_t* largest);

// bad_pair[0] is the largest number before, which it stays where all scores are finite; args.bad_pair is not
// looked at.
absl::Status ScorePairs(Stream stream, const ScoreArgs& args, unsigned long long* bad_pair);
absl::Status FindThresholds(Stream stream, const ThresholdArgs& args);
absl::Status KeepPairs(Stream stream, const KeepArgs& args);
absl::Status WeighPairs(Stream stream, const WeighArgs& args, const Cut<WeightRule>& rules);

// args.destination is -1 before; first_pair[destinations + 1]: pairs to those before; args.pairs_to is not
// looked at.
absl::Status PackPayload(Stream stream, const PayloadArgs& args, std::span<const int64_t> first_pair);
absl::Status PackBits(Stream stream, const Cut<Stretch>& stretches, const uint8_t* marks, uint8_t* bits);
absl::Status UnpackBits(Stream stream, std::span<const Stretch> stretches, const uint8_t* bits,
                        int32_t* index);
// offset[num_keys + 2] is 0 before.
absl::Status GroupByKey(Stream stream, int64_t n, const int32_t* keys, int64_t num_keys, int64_t* offset,
                        int32_t* index);

}  // namespace lrmoe::kernels::cuda
