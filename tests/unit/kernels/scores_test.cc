// Draws, scores of pairs and corrections of their weights, against plain loops.
#include <algorithm>
#include <bit>
#include <catch2/catch.hpp>
#include <cmath>
#include <iterator>
#include <limits>
#include <memory>

#include "kernels/draw.h"
#include "kernels/kernels.h"
#include "tests/unit/kernels/poisoned.h"

namespace lrmoe::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity(),
                kNan = std::numeric_limits<float>::quiet_NaN();

std::vector<float> Uniform(Random& random, int64_t n, double scale) {
  std::vector<float> out(n);
  for (float& value : out) value = static_cast<float>(random.Uniform() * scale);
  return out;
}

// Pairs p = token * k + slot and all that is known about them.
struct Pairs {
  int32_t k;
  std::vector<float> alpha, token_value, norm2;
  std::vector<int32_t> position;
  uint64_t seed, first_pair;
  int64_t size() const { return static_cast<int64_t>(alpha.size()); }
};
Pairs RandomPairs(Random& random) {
  const auto k = static_cast<int32_t>(random.Between(1, 8));
  const int64_t num_tokens = random.Between(0, 60);
  return {k,
          Uniform(random, num_tokens * k, 1),
          Uniform(random, num_tokens, 5),
          Uniform(random, num_tokens * k, 100),
          Permutation(random, num_tokens * k),
          random.Next(),
          random.Below(2) ? random.Below(1000) : random.Next() >> 20};
}

// The score as pairs.h words it, of `pair`.
float Score(ScoreKind kind, const Pairs& pairs, int64_t pair) {
  const auto product = [&] {
    return pairs.alpha[pair] * pairs.alpha[pair] * pairs.token_value[pair / pairs.k] *
           pairs.norm2[pairs.position[pair]];
  };
  const float draw = DrawOf(pairs.seed, pairs.first_pair + static_cast<uint64_t>(pair));
  switch (kind) {
    case ScoreKind::kProduct:
      return product();
    case ScoreKind::kToken:
      return pairs.token_value[pair / pairs.k];
    case ScoreKind::kDraw:
      return draw;
    case ScoreKind::kSampled:
      return std::sqrt(product()) / (1 - draw);
  }
  return kNan;
}

// Scores `pairs` and compares; null for what the kind has no use for.
void CheckScores(ScoreKind kind, const Pairs& pairs) {
  const std::unique_ptr<Device> device = CreateCpuDevice(1).value();
  const bool product = kind == ScoreKind::kProduct || kind == ScoreKind::kSampled;
  Poisoned<float> score(pairs.size());
  auto want = score;
  std::vector<int64_t> bad = {-7};
  device->ScorePairs({.kind = kind,
                      .num_pairs = pairs.size(),
                      .k = pairs.k,
                      .alpha = product ? pairs.alpha.data() : nullptr,
                      .token_value = kind == ScoreKind::kDraw ? nullptr : pairs.token_value.data(),
                      .norm2 = product ? pairs.norm2.data() : nullptr,
                      .position = pairs.position.data(),
                      .seed = pairs.seed,
                      .first_pair = pairs.first_pair,
                      .score = score.ptr(),
                      .bad_pair = bad});
  int64_t want_bad = -1;
  for (int64_t pair = 0; pair < pairs.size(); ++pair) {
    const int32_t at = pairs.position[pair];
    want[at] = Score(kind, pairs, pair);
    if (want_bad < 0 && !std::isfinite(want[at])) want_bad = pair;
    if (std::isnan(want[at]) && std::isnan(score[at])) want[at] = score[at];  // which NaN does not matter
  }
  REQUIRE(score == want);
  REQUIRE(bad[0] == want_bad);
}

constexpr ScoreKind kKinds[] = {ScoreKind::kProduct, ScoreKind::kToken, ScoreKind::kDraw,
                                ScoreKind::kSampled};

}  // namespace

TEST_CASE("a draw is what one step of the seeded generator gives", "[scores]") {
  Random random(3);
  for (int i = 0; i < 10000; ++i) {
    const uint64_t seed = random.Next(), pair = i % 2 ? random.Next() : random.Below(1000);
    const float want =
        static_cast<float>(Random(seed ^ (pair * 0x9E3779B97F4A7C15ULL)).Next() >> 40) * 0x1.0p-24F;
    const float draw = DrawOf(seed, pair);
    REQUIRE(draw == want);
    REQUIRE((draw >= 0 && draw < 1));
  }
  CHECK(DrawOf(0, 0) == static_cast<float>(Random(0).Next() >> 40) * 0x1.0p-24F);
}

TEST_CASE("scores of every kind are what their words say", "[scores]") {
  for (const ScoreKind kind : kKinds) {
    for (uint64_t seed = 0; seed < 100; ++seed) {
      CAPTURE(static_cast<int>(kind), seed);
      Random random(seed);
      CheckScores(kind, RandomPairs(random));
    }
  }
}

TEST_CASE("the lowest pair with a score that is not finite is named", "[scores]") {
  for (const ScoreKind kind : kKinds) {
    for (uint64_t seed = 0; seed < 200; ++seed) {
      CAPTURE(static_cast<int>(kind), seed);
      Random random(seed);
      Pairs pairs = RandomPairs(random);
      if (pairs.size() == 0) continue;
      const float bad[] = {kNan,  -kNan, kInfinity, -kInfinity, std::numeric_limits<float>::max(),
                           -1.0F, -0.0F};
      const auto spoil = [&](std::vector<float>& values) {
        values[random.Below(values.size())] = bad[random.Below(std::size(bad))];
      };
      for (uint64_t i = random.Below(4); i > 0; --i) {
        switch (random.Below(3)) {
          case 0:
            spoil(pairs.alpha);
            break;
          case 1:
            spoil(pairs.token_value);
            break;
          default:
            spoil(pairs.norm2);
        }
      }
      CheckScores(kind, pairs);
    }
  }
}

TEST_CASE("weights of kept pairs are corrected, others stay", "[scores]") {
  const std::unique_ptr<Device> device = CreateCpuDevice(1).value();
  for (uint64_t seed = 0; seed < 400; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    const Pairs pairs = RandomPairs(random);
    const std::vector<int32_t> pair = Permutation(random, pairs.size());
    const std::vector<float> score = Uniform(random, pairs.size(), 4);
    std::vector<uint8_t> kept(pairs.size());
    for (uint8_t& mark : kept) mark = static_cast<uint8_t>(random.Below(2));
    const bool sampled = random.Below(2) == 0, all = random.Below(3) == 0, in_place = random.Below(3) == 0;
    std::vector<Verdict> verdicts(sampled ? 4 : 0);
    for (Verdict& verdict : verdicts)
      verdict = {kNan, -1, random.Below(3) ? static_cast<float>(random.Uniform() * 2) : 0.0F};
    std::vector<WeightRule> rules;
    for (int64_t at = random.Between(0, 3); at < pairs.size();) {  // with gaps that no rule is for
      const int64_t count = random.Between(0, std::min<int64_t>(pairs.size() - at, 40));
      rules.push_back({{at, count},
                       random.Below(3) ? static_cast<float>(random.Uniform() * 8) : 1.0F,
                       sampled ? static_cast<int32_t>(random.Between(-1, 3)) : -1});
      at += count + random.Between(0, 3);
    }
    Shuffle(random, rules);
    Poisoned<float> weight(pairs.alpha);
    auto want = weight;
    device->WeighPairs({.rules = rules,
                        .seed = pairs.seed,
                        .first_pair = pairs.first_pair,
                        .verdicts = sampled ? verdicts.data() : nullptr,
                        .score = sampled ? score.data() : nullptr,
                        .kept = all ? nullptr : kept.data(),
                        .pair = in_place ? nullptr : pair.data(),
                        .weight = weight.ptr()});
    for (const WeightRule& rule : rules) {
      for (int64_t at = rule.range.begin; at < rule.range.begin + rule.range.count; ++at) {
        if (!all && kept[at] == 0) continue;
        const int64_t p = in_place ? at : pair[at];
        if (rule.verdict >= 0) {
          const float size =
              score[at] * (1 - DrawOf(pairs.seed, pairs.first_pair + static_cast<uint64_t>(p)));
          const float least = verdicts[rule.verdict].dropped;
          if (size < least) want[p] *= least / size;
        }
        want[p] *= rule.factor;
      }
    }
    REQUIRE(weight == want);
  }
}

}  // namespace lrmoe::kernels
