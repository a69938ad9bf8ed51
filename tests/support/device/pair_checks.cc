// The pair operations of a device against the host's. What an operation leaves unspecified is not compared.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/random.h"
#include "kernels/pairs.h"
#include "tests/support/device/device_checks.h"
#include "tests/support/device/on_device.h"

namespace lrmoe::testing {
namespace {

using namespace kernels;  // NOLINT: this file is about them

// What one operation gave.
struct Outcome {
  std::vector<std::byte> bits;
  std::vector<double> sums;  // their order of summation is a device's own
  template <typename T>
  void Add(const std::vector<T>& values) {
    const std::vector<std::byte> more = Bytes(values);
    bits.insert(bits.end(), more.begin(), more.end());
  }
  // NaN has many patterns.
  void AddFloats(std::vector<float> values) {
    for (float& value : values)
      if (std::isnan(value)) value = std::numeric_limits<float>::quiet_NaN();
    Add(values);
  }
};

template <typename T>
std::vector<T> First(const std::vector<T>& values, int64_t begin, int64_t count) {
  return {values.begin() + begin, values.begin() + begin + count};
}

std::vector<int32_t> Permutation(int64_t n, Random& random) {
  std::vector<int32_t> order(n);
  std::iota(order.begin(), order.end(), 0);
  for (int64_t i = n - 1; i > 0; --i) std::swap(order[i], order[random.Below(i + 1)]);
  return order;
}

// Items of few entries or none, and a hot one.
struct Shape {
  int64_t items, most, hot;
  std::string Text() const {
    return absl::StrCat(items, " of up to ", most, " entries, one of ", std::max(most, hot));
  }
};

std::vector<int64_t> Counts(const Shape& shape, Random& random) {
  std::vector<int64_t> counts(shape.items);
  for (int64_t& count : counts) count = random.Below(4) == 0 ? 0 : random.Between(0, shape.most);
  if (shape.items > 0 && shape.hot > 0) counts[random.Below(shape.items)] = shape.hot;
  return counts;
}

// Neighbours in one array, with gaps, in another order than their items'.
std::vector<int64_t> Places(const std::vector<int64_t>& counts, Random& random, int64_t* size) {
  std::vector<int64_t> places(counts.size());
  int64_t next = random.Between(0, 3);
  for (const int32_t item : Permutation(static_cast<int64_t>(counts.size()), random)) {
    places[item] = next;
    next += counts[item] + random.Between(0, 2);
  }
  *size = next + 1;
  return places;
}

// Non-negative: with few different values, zeros of both signs among them, or with many.
std::vector<float> Scores(int64_t n, Random& random) {
  const int64_t choice = random.Below(3);
  std::vector<float> scores(n);
  for (float& score : scores) {
    if (choice == 0)
      score = static_cast<float>(random.Uniform() * 1e-6);
    else
      score = choice == 1 ? static_cast<float>(random.Below(4)) * 0.25F : 0.0F;
    if (score == 0 && random.Below(2) == 0) score = -0.0F;
  }
  return scores;
}

class PairChecker {
 public:
  PairChecker(Device& device, CheckSize size, uint64_t seed)
      : device_(device), large_(size == CheckSize::kLarge), random_(seed) {}

  std::vector<CheckResult> Run() {
    std::vector<int64_t> sizes{0, 1, 257, 5000};
    if (large_) sizes.push_back(1'000'003);
    for (const int64_t n : sizes) Words(n);
    std::vector<Shape> shapes{{0, 0, 0}, {1, 5, 1}, {1, 0, 2500}, {3, 0, 0}, {15, 40, 1100}};
    if (large_)
      shapes.insert(shapes.end(), {{1, 0, 262144}, {8192, 64, 0}, {513, 300, 200000}, {128, 4096, 0}});
    for (const Shape& shape : shapes) {
      Stretches(shape);
      Bits(shape);
      Maxima(shape);
      for (int round = 0; round < 3; ++round) Selection(shape);
      Weights(shape);
      Groups(shape);
    }
    Groups({5000, 1, 0});  // more keys than a block sums at once
    std::vector<int64_t> tokens{0, 1, 33, 1100};
    if (large_) tokens.push_back(65536);
    for (const int64_t n : tokens) {
      for (const int32_t k : {1, 4, 7}) ScorePairs(n, k);
      Payload(n, n % 2 == 0 ? 6 : 3, 3);
    }
    Payload(70, 4, large_ ? 513 : 70);
    return std::move(results_);
  }

 private:
  void Case(const std::string& name, const std::string& what,
            const std::function<Outcome(Device&)>& operation) {
    auto found =
        std::find_if(results_.begin(), results_.end(), [&](const auto& r) { return r.name == name; });
    if (found == results_.end()) found = results_.insert(results_.end(), CheckResult{name, 0, 0, ""});
    CheckResult& result = *found;
    ++result.cases;
    const Outcome want = operation(*cpu_), got = operation(device_), again = operation(device_);
    const auto fail = [&](const std::string& why) {
      if (result.failure.empty()) result.failure = absl::StrCat(what, ": ", why);
    };
    if (got.bits != again.bits || got.sums != again.sums) fail("two runs give different bits");
    if (got.bits.size() != want.bits.size() || got.sums.size() != want.sums.size())
      return fail("another number of results");
    const auto differ = std::mismatch(want.bits.begin(), want.bits.end(), got.bits.begin()).first;
    if (differ != want.bits.end())
      fail(absl::StrCat("differs from the host's result in byte ", differ - want.bits.begin()));
    for (size_t i = 0; i < want.sums.size(); ++i) {
      const double difference = std::abs(got.sums[i] - want.sums[i]) / (std::abs(want.sums[i]) + 1e-30);
      if (!(difference <= 1e-12))
        fail(absl::StrCat("sum ", i, " is ", got.sums[i], ", the host's ", want.sums[i]));
      else
        result.worst = std::max(result.worst, difference);
    }
  }

  void Words(int64_t n) {
    const std::vector<int32_t> order = Permutation(n, random_);
    std::vector<int32_t> any(n), values(n);
    for (int32_t& i : any) i = static_cast<int32_t>(random_.Below(n));
    for (int32_t& value : values) value = static_cast<int32_t>(random_.Next());
    const std::string what = absl::StrCat(n, " elements");
    Case("gathered words", what, [&](Device& device) {
      OnDevice index(device, any), src(device, values), dst(device, Poison(n * 4));
      device.GatherWords(n, index.as<int32_t>(), src.get(), dst.get());
      return Outcome{dst.Read(), {}};
    });
    Case("scattered words", what, [&](Device& device) {
      OnDevice index(device, order), src(device, values), dst(device, Poison(n * 4));
      device.ScatterWords(n, index.as<int32_t>(), src.get(), dst.get());
      return Outcome{dst.Read(), {}};
    });
    Case("inverse", what, [&](Device& device) {
      OnDevice index(device, order), dst(device, Poison(n * 4));
      device.Invert(n, index.as<int32_t>(), dst.as<int32_t>());
      return Outcome{dst.Read(), {}};
    });
    for (const int32_t times : {1, 7})
      Case("repeated counts", what, [&](Device& device) {
        OnDevice dst(device, Poison(n * 4));
        device.CountRepeated(n, times, dst.as<int32_t>());
        return Outcome{dst.Read(), {}};
      });
  }

  void Stretches(const Shape& shape) {
    const std::vector<int64_t> counts = Counts(shape, random_);
    int64_t from_size = 0, to_size = 0;
    const std::vector<int64_t> from = Places(counts, random_, &from_size),
                               to = Places(counts, random_, &to_size);
    std::vector<Stretch> stretches;
    for (size_t i = 0; i < counts.size(); ++i)
      stretches.push_back({from[i], to[i], counts[i], static_cast<int32_t>(random_.Between(-1000, 1000))});
    const std::vector<int32_t> values = Permutation(from_size, random_);
    Case("stretches copied", shape.Text(), [&](Device& device) {
      OnDevice src(device, values), dst(device, Poison(to_size * 4));
      device.CopyStretches(stretches, src.get(), dst.get());
      return Outcome{dst.Read(), {}};  // gaps included
    });
    Case("stretches counted", shape.Text(), [&](Device& device) {
      OnDevice dst(device, Poison(to_size * 4));
      device.CountStretches(stretches, dst.as<int32_t>());
      return Outcome{dst.Read(), {}};
    });
  }

  void Bits(const Shape& shape) {
    const std::vector<int64_t> counts = Counts(shape, random_);
    std::vector<int64_t> bytes;
    for (const int64_t count : counts) bytes.push_back((count + 7) / 8);
    int64_t num_marks = 0, num_bytes = 0, num_items = 0;
    const std::vector<int64_t> mark_at = Places(counts, random_, &num_marks),
                               byte_at = Places(bytes, random_, &num_bytes),
                               item_at = Places(counts, random_, &num_items);
    std::vector<uint8_t> marks(num_marks), packed(num_bytes);
    const int64_t rare = random_.Between(1, 5);
    for (uint8_t& mark : marks) mark = random_.Below(rare) == 0;
    for (uint8_t& byte : packed) byte = static_cast<uint8_t>(random_.Next());
    std::vector<Stretch> pack, unpack;
    for (size_t i = 0; i < counts.size(); ++i) {
      pack.push_back({mark_at[i], byte_at[i], counts[i]});
      unpack.push_back({byte_at[i], item_at[i], counts[i], static_cast<int32_t>(random_.Below(1000))});
    }
    Case("bits packed", shape.Text(), [&](Device& device) {
      OnDevice src(device, marks), dst(device, Poison(num_bytes));
      device.PackBits(pack, src.as<uint8_t>(), dst.as<uint8_t>());
      return Outcome{dst.Read(), {}};
    });
    Case("bits unpacked", shape.Text(), [&](Device& device) {
      OnDevice src(device, packed), dst(device, Poison(num_items * 4));
      device.UnpackBits(unpack, src.as<uint8_t>(), dst.as<int32_t>());
      const auto index = dst.Read<int32_t>();
      Outcome outcome;
      for (const Stretch& s : unpack) {
        int64_t set = 0;
        for (int64_t i = 0; i < s.count; ++i) set += packed[s.from + i / 8] >> (i % 8) & 1;
        outcome.Add(First(index, s.to, set));
      }
      return outcome;
    });
  }

  void Maxima(const Shape& shape) {
    const std::vector<int64_t> counts = Counts(shape, random_);
    int64_t size = 0;
    const std::vector<int64_t> begin = Places(counts, random_, &size);
    std::vector<int32_t> values(size);
    for (int32_t& value : values) value = static_cast<int32_t>(random_.Between(-1, 1 << 30));
    std::vector<Range> ranges;
    for (size_t i = 0; i < counts.size(); ++i) ranges.push_back({begin[i], counts[i]});
    Case("largest of ranges", shape.Text(), [&](Device& device) {
      OnDevice src(device, values);
      std::vector<int32_t> largest(ranges.size(), -7);
      device.MaxOfRanges(ranges, src.as<int32_t>(), largest);
      LRMOE_CHECK(device.Wait().ok());
      Outcome outcome;
      outcome.Add(largest);
      return outcome;
    });
  }

  // Items are experts. Each has its scores in ranges of several sources, whose verdicts each then apply to
  // their own positions, which may lie in parts.
  void Selection(const Shape& shape) {
    std::vector<int64_t> counts;
    std::vector<ScoredExpert> experts;
    std::vector<KeepRule> rules;
    std::vector<int64_t> parts_of;  // by part: its range
    for (int64_t of_expert : Counts(shape, random_)) {
      const auto sources = static_cast<int32_t>(random_.Below(2) == 0 ? 1 : random_.Between(2, 4));
      const auto first = static_cast<int32_t>(counts.size());
      const int64_t n = of_expert;
      for (int32_t s = 0; s < sources; ++s) {
        counts.push_back(s + 1 == sources ? of_expert : random_.Between(0, of_expert));
        of_expert -= counts.back();
      }
      if (n > 1)
        experts.push_back({random_.Below(4) == 0 ? n - 1 : random_.Between(1, n - 1), first, sources});
      for (int32_t s = 0; s < sources; ++s)
        rules.push_back({n > 1 ? first + s : random_.Below(2) == 0 ? KeepRule::kAll : KeepRule::kNone});
      if (n > 1 && random_.Below(5) == 0) rules.back().verdict = KeepRule::kNone;
    }
    int64_t size = 0;
    const std::vector<int64_t> begin = Places(counts, random_, &size);
    const std::vector<int32_t> verdict = Permutation(static_cast<int64_t>(counts.size()), random_);
    std::vector<Range> ranges, parts;
    for (size_t r = 0; r < counts.size(); ++r) {
      ranges.push_back({begin[r], counts[r]});
      const int64_t cut = random_.Below(2) == 0 ? 0 : random_.Between(0, counts[r]);
      rules[r].first_range = static_cast<int32_t>(parts.size());
      rules[r].num_ranges = 2;
      if (rules[r].verdict >= 0) rules[r].verdict = verdict[rules[r].verdict];
      parts.push_back({begin[r], cut});
      parts.push_back({begin[r] + cut, counts[r] - cut});
    }
    const std::vector<float> scores = Scores(size, random_);
    const std::vector<int32_t> pairs = Permutation(size, random_);
    Case("selection", shape.Text(), [&](Device& device) {
      OnDevice score(device, scores), verdicts(device, Poison(counts.size() * sizeof(Verdict))),
          scratch(device, Poison(size * 4)), pair(device, pairs), kept(device, Poison(size)),
          kept_pair(device, Poison(size * 4));
      device.FindThresholds(
          {experts, ranges, verdict, score.as<float>(), scratch.as<uint32_t>(), verdicts.as<Verdict>()});
      std::vector<int32_t> num_kept(parts.size(), -7);
      Outcome outcome;
      std::vector<double> total(parts.size(), NAN), of_kept(parts.size(), NAN);
      for (const bool sums : {true, false}) {
        device.KeepPairs({rules, parts, score.as<float>(), verdicts.as<Verdict>(), pair.as<int32_t>(),
                          kept.as<uint8_t>(), kept_pair.as<int32_t>(), num_kept,
                          sums ? total : std::span<double>(), sums ? of_kept : std::span<double>()});
        LRMOE_CHECK(device.Wait().ok());
        outcome.Add(num_kept);
        outcome.Add(kept.Read());
        const auto list = kept_pair.Read<int32_t>();
        for (size_t r = 0; r < parts.size(); ++r) outcome.Add(First(list, parts[r].begin, num_kept[r]));
      }
      outcome.Add(verdicts.Read());
      outcome.sums = total;
      outcome.sums.insert(outcome.sums.end(), of_kept.begin(), of_kept.end());
      return outcome;
    });
  }

  void Weights(const Shape& shape) {
    const std::vector<int64_t> counts = Counts(shape, random_);
    int64_t size = 0;
    const std::vector<int64_t> begin = Places(counts, random_, &size);
    std::vector<WeightRule> rules;
    std::vector<Verdict> all_verdicts(5);
    for (Verdict& verdict : all_verdicts) verdict.dropped = static_cast<float>(random_.Uniform());
    for (size_t i = 0; i < counts.size(); ++i)
      rules.push_back({{begin[i], counts[i]},
                       static_cast<float>(random_.Uniform() * 2),
                       static_cast<int32_t>(random_.Between(-1, 4))});
    std::vector<float> scores(size), weights(size);
    for (float& score : scores) score = static_cast<float>(random_.Uniform());
    for (float& weight : weights) weight = static_cast<float>(random_.Uniform());
    std::vector<uint8_t> marks(size);
    for (uint8_t& mark : marks) mark = random_.Below(2) == 0;
    const std::vector<int32_t> pairs = Permutation(size, random_);
    for (const bool listed : {true, false})
      Case("weights", shape.Text(), [&](Device& device) {
        OnDevice verdicts(device, all_verdicts), score(device, scores), kept(device, marks),
            pair(device, pairs), weight(device, weights);
        device.WeighPairs({rules, 5, uint64_t{1} << 40, verdicts.as<Verdict>(), score.as<float>(),
                           listed ? kept.as<uint8_t>() : nullptr, listed ? pair.as<int32_t>() : nullptr,
                           weight.as<float>()});
        return Outcome{weight.Read(), {}};
      });
  }

  // Items are keys. Lists are short, one is long, and there may be none but that.
  void Groups(const Shape& shape) {
    const std::vector<int64_t> counts = Counts(shape, random_);
    std::vector<int32_t> keys;
    for (size_t key = 0; key < counts.size(); ++key)
      keys.insert(keys.end(), counts[key], static_cast<int32_t>(key));
    const auto n = static_cast<int64_t>(keys.size());
    for (int64_t i = n - 1; i > 0; --i) std::swap(keys[i], keys[random_.Below(i + 1)]);
    Case("groups by key", shape.Text(), [&](Device& device) {
      OnDevice of_item(device, keys), offset(device, Poison((shape.items + 2) * 8)),
          index(device, Poison(n * 4));
      device.GroupByKey(n, of_item.as<int32_t>(), shape.items, offset.as<int64_t>(), index.as<int32_t>());
      Outcome outcome;
      outcome.Add(First(offset.Read<int64_t>(), 0, shape.items + 1));
      outcome.Add(index.Read());
      return outcome;
    });
  }

  void ScorePairs(int64_t tokens, int32_t k) {
    const int64_t pairs = tokens * k;
    std::vector<float> alphas(pairs), norms(pairs), values(tokens);
    for (auto* numbers : {&alphas, &norms, &values})
      for (float& number : *numbers) number = static_cast<float>(random_.Uniform() * 3);
    const std::vector<int32_t> places = Permutation(pairs, random_);
    for (const bool finite : {true, false}) {
      if (!finite && pairs > 0) {  // a product of the two is NaN
        alphas[random_.Below(pairs)] = 0;
        norms[random_.Below(pairs)] = std::numeric_limits<float>::infinity();
        values[random_.Below(tokens)] = std::numeric_limits<float>::quiet_NaN();
      }
      for (const ScoreKind kind :
           {ScoreKind::kProduct, ScoreKind::kToken, ScoreKind::kDraw, ScoreKind::kSampled})
        Case("scores", absl::StrCat(tokens, " tokens of ", k, ", kind ", static_cast<int>(kind)),
             [&](Device& device) {
               OnDevice alpha(device, alphas), value(device, values), norm2(device, norms),
                   position(device, places), score(device, Poison(pairs * 4));
               int64_t bad = -7;
               device.ScorePairs({kind, pairs, k, alpha.as<float>(), value.as<float>(), norm2.as<float>(),
                                  position.as<int32_t>(), 11, uint64_t{1} << 33, score.as<float>(),
                                  std::span<int64_t>(&bad, 1)});
               Outcome outcome;
               outcome.AddFloats(score.Read<float>());
               outcome.Add(std::vector<int64_t>{bad});
               return outcome;
             });
    }
  }

  // Some pairs go nowhere, every third destination gets nothing, the first one most.
  void Payload(int64_t tokens, int32_t k, int32_t destinations) {
    std::vector<std::vector<int32_t>> sent(destinations);
    for (const int32_t pair : Permutation(tokens * k, random_)) {
      const auto d = static_cast<int32_t>(random_.Below(2) == 0 ? 0 : random_.Below(destinations));
      if (random_.Below(4) != 0 && d % 3 != 2) sent[d].push_back(pair);
    }
    std::vector<int64_t> pairs_to;
    std::vector<int32_t> sent_pairs;
    for (const std::vector<int32_t>& list : sent) {
      pairs_to.push_back(static_cast<int64_t>(list.size()));
      sent_pairs.insert(sent_pairs.end(), list.begin(), list.end());
    }
    Case("payload", absl::StrCat(tokens, " tokens of ", k, " to ", destinations), [&](Device& device) {
      OnDevice pair(device, sent_pairs), destination(device, Poison(tokens * k * 4)),
          token(device, Poison(static_cast<int64_t>(sent_pairs.size()) * 4)),
          pair_row(device, Poison(tokens * k * 4));
      std::vector<int32_t> rows(destinations, -7);
      device.PackPayload({tokens, k, pairs_to, pair.as<int32_t>(), destination.as<int32_t>(),
                          token.as<int32_t>(), pair_row.as<int32_t>(), rows});
      const auto tokens_of = token.Read<int32_t>(), row_of = pair_row.Read<int32_t>();
      Outcome outcome;
      outcome.Add(rows);
      int64_t first = 0;
      for (int32_t d = 0; d < destinations; ++d) {
        outcome.Add(First(tokens_of, first, rows[d]));
        first += pairs_to[d];
      }
      for (const int32_t p : sent_pairs) outcome.Add(std::vector<int32_t>{row_of[p]});
      return outcome;
    });
  }

  Device& device_;
  const std::unique_ptr<Device> cpu_ = std::move(CreateCpuDevice(1)).value();
  const bool large_;
  Random random_;
  std::vector<CheckResult> results_;
};

}  // namespace

std::vector<CheckResult> CheckPairs(Device& device, CheckSize size, uint64_t seed) {
  return PairChecker(device, size, seed).Run();
}

}  // namespace lrmoe::testing
