// The K-th largest score, thresholds of experts and what is kept by them, against sorting.
#include <algorithm>
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <functional>
#include <memory>
#include <span>

#include "kernels/kernels.h"
#include "kernels/top_k.h"
#include "tests/unit/kernels/poisoned.h"

namespace lrmoe::kernels {
namespace {

PairOperations& Cpu() {
  static const std::unique_ptr<Device> device = CreateCpuDevice(1).value();
  return *device;
}

constexpr int kFinite = 5, kStyles = 6;  // the first styles are finite
std::vector<float> Scores(Random& random, int64_t n, int style) {
  std::vector<float> scores(n);
  for (float& score : scores) {
    switch (style) {
      case 0:  // any finite non-negative pattern, denormals included
        score = std::bit_cast<float>(static_cast<uint32_t>(random.Below(0x7F800000u)));
        break;
      case 1:  // few values, many ties
        score = static_cast<float>(random.Below(4));
        break;
      case 2:  // all equal
        score = 0.75f;
        break;
      case 3:  // zeros of both signs and a few others
        score =
            random.Below(4) == 0 ? static_cast<float>(random.Uniform()) : (random.Below(2) ? 0.0f : -0.0f);
        break;
      case 4:  // neighbours that differ in the last bits only
        score = std::bit_cast<float>(0x3F800000u + static_cast<uint32_t>(random.Below(2000)));
        break;
      default:  // NaNs, infinities and negative ones
        score =
            std::bit_cast<float>(static_cast<uint32_t>(random.Next()) | (random.Below(2) ? 0x7F800000u : 0));
    }
  }
  return scores;
}

// The bit pattern without sign.
uint32_t Order(float score) {
  return std::bit_cast<uint32_t>(score) & 0x7FFFFFFFu;
}

void CheckKey(const std::vector<float>& scores, int64_t k) {
  CAPTURE(scores.size(), k);
  std::vector<uint32_t> keys(scores.size());
  std::transform(scores.begin(), scores.end(), keys.begin(), KeyOf);
  std::vector<uint32_t> sorted = keys;
  std::sort(sorted.begin(), sorted.end(), std::greater<>());
  REQUIRE(KthLargestKey(keys, k) == sorted[k - 1]);
}

// Ragged ranges of one array, in any order and with gaps between them.
struct Layout {
  std::vector<Range> ranges;
  int64_t size = 0;
};
Layout RandomLayout(Random& random, int64_t num_ranges, int64_t most) {
  Layout out;
  out.ranges.resize(num_ranges);
  for (const int32_t r : Permutation(random, num_ranges)) {
    out.size += random.Between(0, 3);
    out.ranges[r] = {out.size, random.Below(4) == 0 ? 0 : random.Between(0, most)};
    out.size += out.ranges[r].count;
  }
  return out;
}

struct Place {
  int32_t range;
  int64_t at;
};
// The places of an expert's ranges by (score, largest first; range; place).
std::vector<Place> Ranking(std::span<const Range> ranges, const std::vector<float>& score) {
  std::vector<Place> out;
  for (size_t r = 0; r < ranges.size(); ++r)
    for (int64_t i = 0; i < ranges[r].count; ++i)
      out.push_back({static_cast<int32_t>(r), ranges[r].begin + i});
  std::stable_sort(out.begin(), out.end(),
                   [&](Place a, Place b) { return Order(score[a.at]) > Order(score[b.at]); });
  return out;
}

}  // namespace

TEST_CASE("keys order like scores that are not negative, and zeros are equal", "[select]") {
  Random random(1);
  for (int i = 0; i < 10000; ++i) {
    const std::vector<float> two = Scores(random, 2, static_cast<int>(random.Below(kFinite)));
    REQUIRE((KeyOf(two[0]) < KeyOf(two[1])) == (two[0] < two[1]));
    REQUIRE((KeyOf(two[0]) == KeyOf(two[1])) == (two[0] == two[1]));
  }
}

TEST_CASE("the k-th largest key equals sorting", "[select]") {
  Random random(7);
  for (int64_t n : {1, 2, 3, 100, 511, 512, 513, 3000, 65536}) {
    for (int style = 0; style < kStyles; ++style) {
      const std::vector<float> scores = Scores(random, n, style);
      for (int64_t k : {int64_t{1}, (n + 1) / 2, std::max<int64_t>(1, n - 1), n, random.Between(1, n)})
        CheckKey(scores, k);
    }
  }
}

TEST_CASE("the k-th largest key of many random problems", "[select]") {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    Random random(seed);
    const std::vector<float> scores =
        Scores(random, random.Between(1, 1500), static_cast<int>(random.Below(kStyles)));
    CheckKey(scores, random.Between(1, static_cast<int64_t>(scores.size())));
  }
}

TEST_CASE("verdicts split an expert's quota among its ranges", "[select]") {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const int64_t num_ranges = random.Between(0, 20);
    const Layout layout = RandomLayout(random, num_ranges, seed % 10 == 0 ? 1000 : 30);
    const std::vector<float> score = Scores(random, layout.size, static_cast<int>(random.Below(kStyles)));
    // Experts take the ranges one after another; some ranges are nobody's.
    std::vector<ScoredExpert> experts;
    int64_t most = 0;
    for (int32_t first = 0; first < num_ranges;) {
      const auto taken = static_cast<int32_t>(random.Between(1, std::min<int64_t>(num_ranges - first, 5)));
      int64_t pairs = 0;
      for (int32_t r = first; r < first + taken; ++r) pairs += layout.ranges[r].count;
      if (pairs > 1 && random.Below(5) != 0) {
        experts.push_back({random.Below(4) == 0 ? pairs - 1 : random.Between(1, pairs - 1), first, taken});
        most = std::max(most, pairs);
      }
      first += taken;
    }
    Shuffle(random, experts);
    const std::vector<int32_t> verdict = Permutation(random, num_ranges);
    Poisoned<Verdict> verdicts(num_ranges + 1);
    Poisoned<uint32_t> scratch(most);
    auto want = verdicts;
    auto want_scratch = scratch;
    Cpu().FindThresholds({.experts = experts,
                          .ranges = layout.ranges,
                          .verdict = verdict,
                          .score = score.data(),
                          .scratch = scratch.ptr(),
                          .verdicts = verdicts.ptr()});
    for (const ScoredExpert& expert : experts) {
      const std::vector<Place> ranking =
          Ranking(std::span(layout.ranges).subspan(expert.first_range, expert.num_ranges), score);
      const uint32_t threshold = Order(score[ranking[expert.quota - 1].at]);
      std::vector<int32_t> ties(expert.num_ranges, 0);
      for (int64_t i = 0; i < expert.quota; ++i)
        ties[ranking[i].range] += Order(score[ranking[i].at]) == threshold;
      for (int32_t r = 0; r < expert.num_ranges; ++r) {
        want[verdict[expert.first_range + r]] = {
            std::bit_cast<float>(threshold), ties[r],
            std::bit_cast<float>(Order(score[ranking[expert.quota].at]))};
      }
    }
    want_scratch.CopyUnspecified(scratch, 0, most);
    REQUIRE(verdicts == want);
    REQUIRE(scratch == want_scratch);
  }
}

TEST_CASE("pairs are kept by the verdicts of their rules", "[select]") {
  for (uint64_t seed = 0; seed < 600; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const int64_t num_ranges = random.Between(0, 20);
    const Layout layout = RandomLayout(random, num_ranges, 40);
    const bool sums = random.Below(2) == 0;
    const std::vector<float> score =
        Scores(random, layout.size, static_cast<int>(random.Below(sums ? kFinite : kStyles)));
    const std::vector<int32_t> pair = Permutation(random, layout.size);
    // Verdicts of any origin: no tie, more ties than there are, thresholds that no score equals.
    std::vector<Verdict> verdicts(random.Between(0, 6));
    for (Verdict& verdict : verdicts) {
      verdict = {random.Below(3) && layout.size > 0 ? score[random.Below(score.size())] : 0.5F,
                 static_cast<int32_t>(random.Below(2) ? random.Below(4) : random.Below(100)), -1};
    }
    std::vector<KeepRule> rules;
    for (int32_t first = 0; first < num_ranges;) {
      const auto taken = static_cast<int32_t>(random.Between(1, std::min<int64_t>(num_ranges - first, 5)));
      const int32_t verdict =
          static_cast<int32_t>(random.Between(-2, static_cast<int64_t>(verdicts.size()) - 1));
      if (random.Below(6) != 0) rules.push_back({verdict, first, taken});
      first += taken;
    }
    Shuffle(random, rules);
    const bool needed =
        sums || std::any_of(rules.begin(), rules.end(), [](KeepRule r) { return r.verdict >= 0; });
    Poisoned<uint8_t> kept(layout.size);
    Poisoned<int32_t> kept_pair(layout.size);
    auto want_kept = kept;
    auto want_pair = kept_pair;
    std::vector<int32_t> num_kept(num_ranges, -7), want_num = num_kept;
    std::vector<double> total(sums ? num_ranges : 0, -7), of_kept = total;
    Cpu().KeepPairs({.rules = rules,
                     .ranges = layout.ranges,
                     .score = needed ? score.data() : nullptr,
                     .verdicts = verdicts.data(),
                     .pair = pair.data(),
                     .kept = kept.ptr(),
                     .kept_pair = kept_pair.ptr(),
                     .num_kept = num_kept,
                     .total_score = total,
                     .kept_score = of_kept});
    std::vector<bool> ruled(num_ranges, false);
    for (const KeepRule& rule : rules) {
      int64_t ties = 0;
      for (int32_t r = rule.first_range; r < rule.first_range + rule.num_ranges; ++r) {
        const Range range = layout.ranges[r];
        ruled[r] = true;
        want_num[r] = 0;
        double want_total = 0, want_of_kept = 0;
        for (int64_t at = range.begin; at < range.begin + range.count; ++at) {
          bool keep = rule.verdict == KeepRule::kAll;
          if (rule.verdict >= 0) {
            const Verdict& verdict = verdicts[rule.verdict];
            keep = Order(score[at]) > Order(verdict.threshold);
            if (Order(score[at]) == Order(verdict.threshold)) keep = ties++ < verdict.ties;
          }
          want_kept[at] = keep;
          if (keep) want_pair[range.begin + want_num[r]++] = pair[at];
          want_total += score[at];
          if (keep) want_of_kept += score[at];
        }
        want_pair.CopyUnspecified(kept_pair, range.begin + want_num[r], range.begin + range.count);
        if (!sums) continue;
        REQUIRE(std::abs(total[r] - want_total) <= 1e-12 * want_total);
        REQUIRE(std::abs(of_kept[r] - want_of_kept) <= 1e-12 * want_of_kept);
      }
    }
    REQUIRE(kept == want_kept);
    REQUIRE(kept_pair == want_pair);
    REQUIRE(num_kept == want_num);
    for (int64_t r = 0; r < num_ranges && sums; ++r)
      REQUIRE((ruled[r] || (total[r] == -7 && of_kept[r] == -7)));
  }
}

// Sources hold the pairs of each expert in some ranges of theirs; the owner gets all scores, judges, and each
// source keeps by its verdicts.
TEST_CASE("sources keep what a stable sort of all scores keeps", "[select]") {
  for (uint64_t seed = 0; seed < 500; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const auto num_sources = static_cast<int32_t>(random.Between(1, 5));
    const auto num_experts = static_cast<int32_t>(random.Between(1, 6));
    const auto parts = static_cast<int32_t>(random.Between(1, 3));  // ranges of an expert at a source
    const auto style = static_cast<int>(random.Below(kStyles));
    const bool hot = random.Below(4) == 0;  // all pairs are of the last expert
    std::vector<Layout> layout;
    std::vector<std::vector<float>> score;
    for (int32_t s = 0; s < num_sources; ++s) {
      layout.push_back(RandomLayout(random, num_experts * parts, seed % 20 == 0 ? 700 : 20));
      for (int32_t r = 0; hot && r < (num_experts - 1) * parts; ++r) layout[s].ranges[r].count = 0;
      score.push_back(Scores(random, layout[s].size, style));
    }
    struct Held {
      int32_t source;
      int64_t at;
    };
    std::vector<std::vector<uint8_t>> want(num_sources);
    for (int32_t s = 0; s < num_sources; ++s) want[s].assign(score[s].size(), 0);
    std::vector<float> gathered;
    std::vector<Range> ranges;
    std::vector<int32_t> verdict;
    std::vector<ScoredExpert> experts;
    std::vector<int32_t> rule(num_experts);  // the same at all sources
    std::vector<int64_t> quota;
    for (int32_t e = 0; e < num_experts; ++e) {
      std::vector<Held> held;
      const auto first_range = static_cast<int32_t>(ranges.size());
      for (int32_t s = 0; s < num_sources; ++s) {
        ranges.push_back({static_cast<int64_t>(gathered.size()), 0});
        verdict.push_back(s * num_experts + e);
        for (int32_t r = e * parts; r < (e + 1) * parts; ++r) {
          for (int64_t i = 0; i < layout[s].ranges[r].count; ++i) {
            held.push_back({s, layout[s].ranges[r].begin + i});
            gathered.push_back(score[s][held.back().at]);
            ++ranges.back().count;
          }
        }
      }
      const auto n = static_cast<int64_t>(held.size());
      quota.push_back(random.Between(0, n));
      rule[e] = quota[e] == n ? KeepRule::kAll : quota[e] == 0 ? KeepRule::kNone : e;
      if (rule[e] == e) experts.push_back({quota[e], first_range, num_sources});
      std::stable_sort(held.begin(), held.end(), [&](Held a, Held b) {
        return Order(score[a.source][a.at]) > Order(score[b.source][b.at]);
      });
      for (int64_t i = 0; i < quota[e]; ++i) want[held[i].source][held[i].at] = 1;
    }
    std::vector<uint32_t> scratch(gathered.size());
    std::vector<Verdict> verdicts(static_cast<size_t>(num_sources) * num_experts);
    Cpu().FindThresholds({.experts = experts,
                          .ranges = ranges,
                          .verdict = verdict,
                          .score = gathered.data(),
                          .scratch = scratch.data(),
                          .verdicts = verdicts.data()});
    std::vector<int64_t> num_kept(num_experts, 0);
    for (int32_t s = 0; s < num_sources; ++s) {
      CAPTURE(s);
      std::vector<KeepRule> rules;
      for (int32_t e = 0; e < num_experts; ++e) rules.push_back({rule[e], e * parts, parts});
      const std::vector<int32_t> pair = Permutation(random, layout[s].size);
      std::vector<uint8_t> kept(layout[s].size, 0);
      std::vector<int32_t> kept_pair(layout[s].size), num(layout[s].ranges.size());
      Cpu().KeepPairs({.rules = rules,
                       .ranges = layout[s].ranges,
                       .score = score[s].data(),
                       .verdicts = verdicts.data() + s * num_experts,
                       .pair = pair.data(),
                       .kept = kept.data(),
                       .kept_pair = kept_pair.data(),
                       .num_kept = num,
                       .total_score = {},
                       .kept_score = {}});
      REQUIRE(kept == want[s]);
      for (size_t r = 0; r < num.size(); ++r) num_kept[r / parts] += num[r];
    }
    REQUIRE(num_kept == quota);
  }
}

}  // namespace lrmoe::kernels
