// Operations on arrays with one entry per pair or row: indices, scores, marks (paper, Algorithm 1, lines
// 15-20: score, select, route, compact). A pair is token * k + slot; its position is its place in an order by
// destination that groups pairs which belong together.
//
// Pointers are the device's memory. Spans are the host's: those of descriptions (stretches, rules, sizes) are
// read before the call returns, those of results are there after Device::Wait. Everything is exact and
// deterministic. Indices are below 2^31; sizes that a description states are the caller's promise.
#pragma once

#include <cstdint>
#include <span>

namespace lrmoe::kernels {

// `count` entries from `from` on belong at `to` on.
struct Stretch {
  int64_t from = 0, to = 0, count = 0;
  int32_t add = 0;  // to each value, where they are indices
};

struct Range {
  int64_t begin = 0, count = 0;
};

// What one source keeps of one expert: scores above the threshold, and the first `ties` of those equal to it.
struct Verdict {
  float threshold = 0;
  int32_t ties = 0;
  float dropped = 0;  // the largest score of all sources that is not kept
};

// What a score is made of. `draw` is the pair's draw (draw.h).
enum class ScoreKind : uint8_t {
  kProduct,  // alpha * alpha * token value * norm2, rounded one by one: R_u of the paper, section 3.3
  kToken,    // the token's value
  kDraw,     // the draw
  kSampled,  // sqrt(product) / (1 - draw)
};

struct ScoreArgs {
  ScoreKind kind = ScoreKind::kProduct;
  int64_t num_pairs = 0;
  int32_t k = 0;
  const float* alpha = nullptr;        // [num_pairs]
  const float* token_value = nullptr;  // [num_pairs / k]
  const float* norm2 = nullptr;        // by position
  const int32_t* position = nullptr;   // [num_pairs], a permutation
  uint64_t seed = 0, first_pair = 0;   // pair p draws as first_pair + p
  float* score = nullptr;              // by position
  std::span<int64_t> bad_pair;         // [1], host: the lowest pair whose score is NaN or infinite; none: -1
};

// The pairs of one expert from all sources, whose scores lie in `num_ranges` ranges.
struct ScoredExpert {
  int64_t quota = 0;  // 0 < quota < the pairs of its ranges
  int32_t first_range = 0, num_ranges = 0;
};
struct ThresholdArgs {
  std::span<const ScoredExpert> experts;
  std::span<const Range> ranges;
  std::span<const int32_t> verdict;  // [ranges]: where in `verdicts` each range's belongs
  const float* score = nullptr;
  uint32_t* scratch = nullptr;  // as many as the most pairs of one expert
  Verdict* verdicts = nullptr;
};

// Which pairs of one expert survive; `num_ranges` ranges of positions, in (token, slot) order.
struct KeepRule {
  static constexpr int32_t kAll = -1, kNone = -2;
  int32_t verdict = kAll;  // or an index
  int32_t first_range = 0, num_ranges = 0;
};
struct KeepArgs {
  std::span<const KeepRule> rules;
  std::span<const Range> ranges;
  const float* score = nullptr;       // by position; only where a rule has a verdict
  const Verdict* verdicts = nullptr;  // likewise
  const int32_t* pair = nullptr;      // by position
  uint8_t* kept = nullptr;            // by position: 1 or 0
  int32_t* kept_pair = nullptr;       // a range's kept pairs, from its begin on; what follows is unspecified
  // Host, [ranges] each. Sums of scores and of kept scores, in an order that depends on the device only;
  // empty: not wanted. With them, scores of all rules are read.
  std::span<int32_t> num_kept;
  std::span<double> total_score, kept_score;
};

// Weights of kept entries: weight[pair] *= least / size where size = score * (1 - draw) is below `least`, the
// largest score that was dropped; then *= factor: the corrections of sampling and of dropped rows.
struct WeightRule {
  Range range;
  float factor = 1;
  int32_t verdict = -1;  // whose `dropped` is the least; negative: no draw, scores are not looked at
};
struct WeighArgs {
  std::span<const WeightRule> rules;
  uint64_t seed = 0, first_pair = 0;
  const Verdict* verdicts = nullptr;
  const float* score = nullptr;   // by position
  const uint8_t* kept = nullptr;  // by position; null: all are
  const int32_t* pair = nullptr;  // by position; null: the position itself
  float* weight = nullptr;        // by pair
};

// A token that goes to a destination for several of its pairs travels once.
struct PayloadArgs {
  int64_t num_tokens = 0;
  int32_t k = 0;
  std::span<const int64_t> pairs_to;   // [destinations]
  const int32_t* sent_pair = nullptr;  // [sum of pairs_to], by destination
  int32_t* destination = nullptr;      // [num_tokens * k] scratch
  // [sum of pairs_to]: each destination's tokens, ascending, from the first place of its pairs on; what
  // follows them is unspecified.
  int32_t* token = nullptr;
  // [num_tokens * k]: the row of a pair that travels among its destination's; others: unspecified.
  int32_t* pair_row = nullptr;
  std::span<int32_t> rows;  // [destinations], host
};

// As Device; what is here is for devices that share the host's memory.
class PairOperations {
 public:
  virtual ~PairOperations() = default;

  // Elements of 4 bytes. dst[i] = src[index[i]].
  virtual void GatherWords(int64_t n, const int32_t* index, const void* src, void* dst);
  // dst[index[i]] = src[i]; indices are distinct.
  virtual void ScatterWords(int64_t n, const int32_t* index, const void* src, void* dst);
  // dst[index[i]] = i.
  virtual void Invert(int64_t n, const int32_t* index, int32_t* dst);
  // dst[to + i] = src[from + i] + add. Targets do not overlap, src and dst neither.
  virtual void CopyStretches(std::span<const Stretch> stretches, const void* src, void* dst);
  // dst[to + i] = from + add + i.
  virtual void CountStretches(std::span<const Stretch> stretches, int32_t* dst);
  // dst[i] = i / times; times > 0.
  virtual void CountRepeated(int64_t n, int32_t times, int32_t* dst);
  // The largest of each range, and -1 where it is empty, to the host; all are -1 and more.
  virtual void MaxOfRanges(std::span<const Range> ranges, const int32_t* src, std::span<int32_t> largest);

  virtual void ScorePairs(const ScoreArgs& args);
  // The K largest of each expert's scores exactly, ties to the first range and the lowest place in it. Scores
  // order by their bit patterns without sign.
  virtual void FindThresholds(const ThresholdArgs& args);
  virtual void KeepPairs(const KeepArgs& args);
  virtual void WeighPairs(const WeighArgs& args);
  virtual void PackPayload(const PayloadArgs& args);

  // Bit i % 8 of byte to + i / 8 is mark from + i, which is 1 or 0. The last byte is filled with zeros.
  virtual void PackBits(std::span<const Stretch> stretches, const uint8_t* marks, uint8_t* bits);
  // Writes add + i for each set bit i of the `count` from byte `from` on, ascending, from index[to] on.
  virtual void UnpackBits(std::span<const Stretch> stretches, const uint8_t* bits, int32_t* index);

  // index[offset[key] .. offset[key + 1]) are the items of `key`, ascending; keys[n] are below num_keys,
  // index[n], offset[num_keys + 2], of which the last is unspecified.
  virtual void GroupByKey(int64_t n, const int32_t* keys, int64_t num_keys, int64_t* offset, int32_t* index);
};

}  // namespace lrmoe::kernels
