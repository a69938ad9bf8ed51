// Pair operations in the host's memory, on the calling thread. Which pairs are kept no branch predictor
// knows: loops over them take the same way for all, and a dropped one is written over by the next.
#include "kernels/pairs.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/draw.h"
#include "kernels/precondition.h"
#include "kernels/top_k.h"

namespace lrmoe::kernels {
namespace {

float ScoreOf(const ScoreArgs& args, int64_t pair, float token_value, int32_t position) {
  const float alpha = args.alpha[pair];
  return alpha * alpha * token_value * args.norm2[position];
}

// One expert's verdicts: `tie` of each range are kept, as many as there are left in order.
void JudgeExpert(const ThresholdArgs& args, const ScoredExpert& expert) {
  const auto ranges = args.ranges.subspan(expert.first_range, expert.num_ranges);
  int64_t n = 0;
  for (const Range& range : ranges) {
    std::transform(args.score + range.begin, args.score + range.begin + range.count, args.scratch + n, KeyOf);
    n += range.count;
  }
  LRMOE_KERNELS_REQUIRE(expert.quota > 0 && expert.quota < n);
  const auto threshold =
      static_cast<int32_t>(KthLargestKey({args.scratch, static_cast<size_t>(n)}, expert.quota));
  int64_t above = 0, equal = 0;
  int32_t below = 0;
  for (const Range& range : ranges) {
    for (int64_t i = range.begin; i < range.begin + range.count; ++i) {
      const auto key = static_cast<int32_t>(KeyOf(args.score[i]));
      above += key > threshold;
      equal += key == threshold;
      below = std::max(below, key < threshold ? key : 0);
    }
  }
  int64_t ties = expert.quota - above;
  const auto dropped = std::bit_cast<float>(equal > ties ? threshold : below);
  for (int32_t r = 0; r < expert.num_ranges; ++r) {
    int64_t here = 0;
    if (ties > 0) {
      for (int64_t i = ranges[r].begin; i < ranges[r].begin + ranges[r].count; ++i)
        here += static_cast<int32_t>(KeyOf(args.score[i])) == threshold;
      here = std::min(here, ties);
      ties -= here;
    }
    args.verdicts[args.verdict[expert.first_range + r]] = {std::bit_cast<float>(threshold),
                                                           static_cast<int32_t>(here), dropped};
  }
}

}  // namespace

void PairOperations::GatherWords(int64_t n, const int32_t* index, const void* src, void* dst) {
  const auto* from = static_cast<const uint32_t*>(src);
  auto* to = static_cast<uint32_t*>(dst);
  for (int64_t i = 0; i < n; ++i) to[i] = from[index[i]];
}

void PairOperations::ScatterWords(int64_t n, const int32_t* index, const void* src, void* dst) {
  const auto* from = static_cast<const uint32_t*>(src);
  auto* to = static_cast<uint32_t*>(dst);
  for (int64_t i = 0; i < n; ++i) to[index[i]] = from[i];
}

void PairOperations::Invert(int64_t n, const int32_t* index, int32_t* dst) {
  for (int64_t i = 0; i < n; ++i) dst[index[i]] = static_cast<int32_t>(i);
}

void PairOperations::CopyStretches(std::span<const Stretch> stretches, const void* src, void* dst) {
  for (const Stretch& s : stretches) {
    const uint32_t* const from = static_cast<const uint32_t*>(src) + s.from;
    uint32_t* const to = static_cast<uint32_t*>(dst) + s.to;
    const auto add = static_cast<uint32_t>(s.add);
    for (int64_t i = 0; i < s.count; ++i) to[i] = from[i] + add;
  }
}

void PairOperations::CountStretches(std::span<const Stretch> stretches, int32_t* dst) {
  for (const Stretch& s : stretches)
    std::iota(dst + s.to, dst + s.to + s.count, static_cast<int32_t>(s.from + s.add));
}

void PairOperations::CountRepeated(int64_t n, int32_t times, int32_t* dst) {
  for (int64_t i = 0, value = 0; i < n; ++value)
    for (const int64_t end = std::min(n, i + times); i < end; ++i) dst[i] = static_cast<int32_t>(value);
}

void PairOperations::MaxOfRanges(std::span<const Range> ranges, const int32_t* src,
                                 std::span<int32_t> largest) {
  for (size_t r = 0; r < ranges.size(); ++r) {
    int32_t most = -1;
    for (int64_t i = ranges[r].begin; i < ranges[r].begin + ranges[r].count; ++i)
      most = std::max(most, src[i]);
    largest[r] = most;
  }
}

void PairOperations::ScorePairs(const ScoreArgs& args) {
  const auto each = [&](const auto& score_of) {
    int64_t pair = 0;
    for (int64_t t = 0; pair < args.num_pairs; ++t) {
      const float value = args.token_value == nullptr ? 0 : args.token_value[t];
      for (const int64_t end = pair + args.k; pair < end; ++pair)
        args.score[args.position[pair]] = score_of(pair, value);
    }
  };
  const auto draw = [&](int64_t pair) {
    return DrawOf(args.seed, args.first_pair + static_cast<uint64_t>(pair));
  };
  switch (args.kind) {
    case ScoreKind::kProduct:
      each([&](int64_t pair, float value) { return ScoreOf(args, pair, value, args.position[pair]); });
      break;
    case ScoreKind::kToken:
      each([](int64_t, float value) { return value; });
      break;
    case ScoreKind::kDraw:
      each([&](int64_t pair, float) { return draw(pair); });
      break;
    case ScoreKind::kSampled:
      each([&](int64_t pair, float value) {
        return std::sqrt(ScoreOf(args, pair, value, args.position[pair])) / (1 - draw(pair));
      });
      break;
  }
  // Almost always all are finite: one look at all exponents, in vectors, before any at one.
  const auto is_bad = [](float score) {
    return (std::bit_cast<uint32_t>(score) & 0x7F800000u) == 0x7F800000u;
  };
  uint32_t bad = 0;
  for (int64_t q = 0; q < args.num_pairs; ++q) bad |= static_cast<uint32_t>(is_bad(args.score[q]));
  args.bad_pair[0] = -1;
  for (int64_t pair = 0; pair < args.num_pairs && bad != 0; ++pair) {
    if (!is_bad(args.score[args.position[pair]])) continue;
    args.bad_pair[0] = pair;
    break;
  }
}

void PairOperations::FindThresholds(const ThresholdArgs& args) {
  for (const ScoredExpert& expert : args.experts) JudgeExpert(args, expert);
}

void PairOperations::KeepPairs(const KeepArgs& args) {
  for (const KeepRule& rule : args.rules) {
    int32_t ties = rule.verdict >= 0 ? args.verdicts[rule.verdict].ties : 0;
    for (int32_t r = rule.first_range; r < rule.first_range + rule.num_ranges; ++r) {
      const Range range = args.ranges[r];
      uint8_t* const kept = args.kept + range.begin;
      if (rule.verdict < 0) {
        std::fill_n(kept, range.count, rule.verdict == KeepRule::kAll ? 1 : 0);
      } else {
        const auto threshold = static_cast<int32_t>(KeyOf(args.verdicts[rule.verdict].threshold));
        const float* const score = args.score + range.begin;
        int64_t equal = 0;
        for (int64_t i = 0; i < range.count; ++i) {
          const auto key = static_cast<int32_t>(KeyOf(score[i]));
          kept[i] = key > threshold;
          equal += key == threshold;
        }
        for (int64_t i = 0; equal > 0 && ties > 0 && i < range.count; ++i) {
          if (static_cast<int32_t>(KeyOf(score[i])) != threshold) continue;
          kept[i] = 1;
          --equal;
          --ties;
        }
      }
      int32_t* const list = args.kept_pair + range.begin;
      int32_t listed = 0;
      for (int64_t i = 0; i < range.count; ++i) {
        list[listed] = args.pair[range.begin + i];
        listed += kept[i];
      }
      args.num_kept[r] = listed;
      if (args.total_score.empty()) continue;
      double total[4] = {}, of_kept[4] = {};  // sums that do not wait for each other
      for (int64_t i = 0; i < range.count; ++i) {
        const float score = args.score[range.begin + i];
        total[i % 4] += score;
        of_kept[i % 4] += score * static_cast<float>(kept[i]);
      }
      args.total_score[r] = total[0] + total[1] + total[2] + total[3];
      args.kept_score[r] = of_kept[0] + of_kept[1] + of_kept[2] + of_kept[3];
    }
  }
}

void PairOperations::WeighPairs(const WeighArgs& args) {
  for (const WeightRule& rule : args.rules) {
    const float least = rule.verdict < 0 ? 0 : args.verdicts[rule.verdict].dropped;
    for (int64_t q = rule.range.begin; q < rule.range.begin + rule.range.count; ++q) {
      if (args.kept != nullptr && args.kept[q] == 0) continue;
      const int64_t pair = args.pair == nullptr ? q : args.pair[q];
      float& weight = args.weight[pair];
      if (rule.verdict >= 0) {
        const float size =
            args.score[q] * (1 - DrawOf(args.seed, args.first_pair + static_cast<uint64_t>(pair)));
        if (size < least) weight *= least / size;
      }
      weight *= rule.factor;
    }
  }
}

// The destinations of a token are bits of a word, 64 destinations at a time.
void PairOperations::PackPayload(const PayloadArgs& args) {
  const auto num_destinations = static_cast<int32_t>(args.pairs_to.size());
  std::fill_n(args.destination, args.num_tokens * args.k, -1);
  std::vector<int32_t*> token(num_destinations);
  int64_t before = 0;
  for (int32_t d = 0; d < num_destinations; ++d) {
    token[d] = args.token + before;
    for (const int64_t end = before + args.pairs_to[d]; before < end; ++before)
      args.destination[args.sent_pair[before]] = d;
  }
  std::vector<int32_t> count(num_destinations + 1, 0);  // by destination + 1
  for (int32_t first = 0; first < num_destinations; first += 64) {
    const int32_t* destination = args.destination;
    int32_t* row = args.pair_row;
    for (int32_t t = 0; t < static_cast<int32_t>(args.num_tokens); ++t) {
      uint64_t present = 0;
      for (int32_t slot = 0; slot < args.k; ++slot, ++destination, ++row) {
        const auto bit = static_cast<uint32_t>(*destination - first);
        // All ones for one of these 64, else 0: from a comparison the compiler would make a branch.
        const auto here = static_cast<int32_t>((int64_t{bit} - 64) >> 32);
        const int32_t otherwise = first == 0 ? -1 : *row;
        *row = (count[*destination + 1] & here) | (otherwise & ~here);
        present |= static_cast<uint64_t>(here & 1) << (bit % 64);
      }
      for (; present != 0; present &= present - 1) {
        const int32_t d = first + std::countr_zero(present);
        token[d][count[d + 1]++] = t;
      }
    }
  }
  std::copy_n(count.begin() + 1, num_destinations, args.rows.begin());
}

void PairOperations::PackBits(std::span<const Stretch> stretches, const uint8_t* marks, uint8_t* bits) {
  for (const Stretch& s : stretches) {
    const uint8_t* const from = marks + s.from;
    uint8_t* to = bits + s.to;
    int64_t i = 0;
    for (; i + 8 <= s.count; i += 8) {
      uint64_t eight;
      std::memcpy(&eight, from + i, 8);
      *to++ = static_cast<uint8_t>((eight * 0x0102040810204080ULL) >> 56);  // the low bits of eight bytes
    }
    if (i == s.count) continue;
    *to = 0;
    for (int64_t j = i; j < s.count; ++j) *to |= static_cast<uint8_t>(from[j] << (j - i));
  }
}

void PairOperations::UnpackBits(std::span<const Stretch> stretches, const uint8_t* bits, int32_t* index) {
  for (const Stretch& s : stretches) {
    int32_t* next = index + s.to;
    for (int64_t i = 0; i < s.count; i += 64) {
      const int64_t here = std::min<int64_t>(s.count - i, 64);
      uint64_t set = 0;
      std::memcpy(&set, bits + s.from + i / 8, (here + 7) / 8);
      for (set &= ~uint64_t{0} >> (64 - here); set != 0; set &= set - 1)
        *next++ = static_cast<int32_t>(s.add + i + std::countr_zero(set));
    }
  }
}

void PairOperations::GroupByKey(int64_t n, const int32_t* keys, int64_t num_keys, int64_t* offset,
                                int32_t* index) {
  // Counted two places on, an entry is its key's first place while the items are listed and the next key's
  // afterwards.
  std::fill_n(offset, num_keys + 2, 0);
  for (int64_t i = 0; i < n; ++i) ++offset[keys[i] + 2];
  std::partial_sum(offset, offset + num_keys + 2, offset);
  for (int64_t i = 0; i < n; ++i) index[offset[keys[i] + 1]++] = static_cast<int32_t>(i);
}

}  // namespace lrmoe::kernels
