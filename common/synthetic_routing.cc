#include "common/synthetic_routing.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "common/cluster.h"
#include "common/random.h"

namespace lrmoe {
namespace {

constexpr double kNoise = 0.2;
constexpr double kHot = 8, kHotRankHeat = 4, kBurstHeat = 64;
constexpr int32_t kBurstPeriod = 8;

uint64_t Mixed(uint64_t a, uint64_t b) {
  return Random(a ^ (Random(b).Next() * 0x9E3779B97F4A7C15ULL)).Next();
}

// Layer 0 has the seed itself, so that it is the literature's.
uint64_t LayerSeed(const SyntheticOptions& options, int32_t layer) {
  return layer == 0 ? options.seed : Mixed(options.seed, static_cast<uint64_t>(layer));
}

std::vector<int32_t> Permutation(int32_t size, uint64_t seed) {
  Random random(seed);
  std::vector<int32_t> out(size);
  std::iota(out.begin(), out.end(), 0);
  for (int32_t i = size - 1; i >= 1; --i) std::swap(out[i], out[random.Next() % (i + 1)]);
  return out;
}

// Experts with popularity 1 and the hot ones of W2 and W3.
std::vector<double> HotRankHeat(const SyntheticOptions& o, uint64_t seed) {
  const std::vector<int32_t> owner = ContiguousOwners(o.num_experts, o.num_ranks);
  std::vector<std::vector<int32_t>> owned(o.num_ranks);
  for (int32_t e = 0; e < o.num_experts; ++e) owned[owner[e]].push_back(e);
  std::erase_if(owned, [](const std::vector<int32_t>& list) { return list.empty(); });
  const auto num_owners = static_cast<int32_t>(owned.size());
  const std::vector<int32_t> order = Permutation(num_owners, seed);
  const std::vector<int32_t>& hot = owned[order[0]];
  std::vector<double> heat(o.num_experts, 1);
  for (size_t j = 0; j < hot.size(); ++j) {
    if (o.workload.kind == SyntheticKind::kHotRank) {
      heat[hot[j]] = kHotRankHeat;
    } else {
      const std::vector<int32_t>& list = owned[order[j % num_owners]];
      heat[list[std::min(j / num_owners, list.size() - 1)]] = kHotRankHeat;
    }
  }
  return heat;
}

// At least top_k experts stay active.
std::vector<double> ZeroLoadHeat(const SyntheticOptions& o) {
  const std::vector<int32_t> owner = ContiguousOwners(o.num_experts, o.num_ranks);
  std::vector<double> heat(o.num_experts, 0);
  int32_t active = 0;
  for (int32_t e = 0; e < o.num_experts; ++e) {
    heat[e] = owner[e] % 4 != 3 && e % 2 == 0 ? 1 : 0;
    active += heat[e] > 0;
  }
  for (int32_t e = 0; e < o.num_experts && active < o.top_k; ++e)
    if (heat[e] == 0) heat[e] = 1, ++active;
  return heat;
}

// Popularity of each expert, the same for all sources.
std::vector<double> Heat(const SyntheticOptions& o, int64_t step, uint64_t seed) {
  const int32_t num_hot = std::max(1, o.num_experts / 16);
  std::vector<double> heat(o.num_experts, 1);
  switch (o.workload.kind) {
    case SyntheticKind::kBalanced:
      break;
    case SyntheticKind::kHotExperts:
    case SyntheticKind::kRaggedSources: {
      const std::vector<int32_t> order = Permutation(o.num_experts, seed);
      for (int32_t j = 0; j < num_hot; ++j) heat[order[j]] = kHot;
      break;
    }
    case SyntheticKind::kHotRank:
    case SyntheticKind::kHotSpread:
      return HotRankHeat(o, seed);
    case SyntheticKind::kZeroLoad:
      return ZeroLoadHeat(o);
    case SyntheticKind::kRotating: {
      const uint64_t place = seed % o.num_experts + (step % o.num_experts) * num_hot;
      for (int32_t j = 0; j < num_hot; ++j) heat[(place + j) % o.num_experts] = kHot;
      break;
    }
    case SyntheticKind::kBurst:
      if (step % kBurstPeriod == kBurstPeriod - 1)
        heat[Mixed(seed, static_cast<uint64_t>(step)) % o.num_experts] = kBurstHeat;
      break;
    case SyntheticKind::kZipf: {
      const std::vector<int32_t> order = Permutation(o.num_experts, seed);
      for (int32_t j = 0; j < o.num_experts; ++j) heat[order[j]] = std::pow(j + 1, -o.workload.alpha);
      break;
    }
  }
  return heat;
}

// The least factor c, up to the last of 100 bisections, with sum of min(1, c x heat) >= top_k.
double CappingFactor(const std::vector<double>& heat, int32_t top_k) {
  const auto total = [&](double c) {
    double sum = 0;
    for (double h : heat) sum += std::min(1.0, c * h);
    return sum;
  };
  double low = 0, high = 1;
  while (total(high) < top_k) high *= 2;
  for (int i = 0; i < 100; ++i) {
    const double middle = (low + high) / 2;
    (total(middle) < top_k ? low : high) = middle;
  }
  return high;
}

// `tokens` x top_k pairs by popularity, at most `tokens` to an expert; the remainders' ties begin at expert
// `first`.
std::vector<int64_t> Deal(const std::vector<double>& heat, int64_t tokens, int32_t top_k, int64_t first) {
  const auto num_experts = static_cast<int32_t>(heat.size());
  const double c = CappingFactor(heat, top_k);
  double sum = 0;
  for (double h : heat) sum += std::min(1.0, c * h);
  std::vector<int64_t> count(num_experts);
  std::vector<double> fraction(num_experts);
  const int64_t pairs = tokens * top_k;
  int64_t left = pairs;
  for (int32_t e = 0; e < num_experts; ++e) {
    const double exact = static_cast<double>(pairs) * std::min(1.0, c * heat[e]) / sum;
    count[e] = std::min(tokens, static_cast<int64_t>(exact));
    fraction[e] = exact - static_cast<double>(count[e]);
    left -= count[e];
  }
  std::vector<int32_t> order(num_experts);
  for (int32_t i = 0; i < num_experts; ++i) order[i] = static_cast<int32_t>((first + i) % num_experts);
  std::ranges::stable_sort(order, [&](int32_t a, int32_t b) { return fraction[a] > fraction[b]; });
  while (left > 0)
    for (int32_t e : order)
      if (left > 0 && count[e] < tokens && heat[e] > 0) ++count[e], --left;
  return count;
}

// The literature's Zipf counts of the whole cluster; units that do not divide go to the sources in turn.
RoutedCounts ExactZipf(const SyntheticOptions& o, const std::vector<double>& heat) {
  const std::vector<int64_t> total = Deal(heat, o.tokens_per_rank * o.num_ranks, o.top_k, 0);
  RoutedCounts out(o.num_ranks, o.num_experts);
  int32_t next = 0;
  for (int32_t e = 0; e < o.num_experts; ++e) {
    for (int32_t s = 0; s < o.num_ranks; ++s) out.at(s, e) = total[e] / o.num_ranks;
    for (int64_t unit = total[e] % o.num_ranks; unit > 0; --unit) {
      ++out.at(next, e);
      next = (next + 1) % o.num_ranks;
    }
  }
  return out;
}

int64_t TokensOf(const SyntheticOptions& o, int32_t source) {
  if (o.workload.kind == SyntheticKind::kZeroLoad && source % 4 == 3) return 0;
  if (o.workload.kind != SyntheticKind::kRaggedSources || o.num_ranks == 1) return o.tokens_per_rank;
  const auto up_to = [&](int64_t s) { return o.tokens_per_rank * s * (s - 1) / (o.num_ranks - 1); };
  return up_to(source + 1) - up_to(source);
}

absl::Status InRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  if (value >= low && value <= high) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; allowed: ", low, "..", high));
}

}  // namespace

absl::StatusOr<SyntheticWorkload> ParseSyntheticWorkload(absl::string_view text) {
  if (text.size() == 2 && text[0] == 'W' && text[1] >= '0' && text[1] <= '7')
    return SyntheticWorkload{static_cast<SyntheticKind>(text[1] - '0'), 0};
  absl::string_view alpha = text;
  double value;
  if (absl::ConsumePrefix(&alpha, "zipf:") && absl::SimpleAtod(alpha, &value) && value >= 0 && value <= 10)
    return SyntheticWorkload{SyntheticKind::kZipf, value};
  return absl::InvalidArgumentError(
      absl::StrCat("workload is \"", text, "\"; allowed: W0..W7, or zipf:ALPHA with ALPHA from 0 to 10"));
}

std::string ToString(const SyntheticWorkload& workload) {
  if (workload.kind == SyntheticKind::kZipf) return absl::StrCat("zipf:", workload.alpha);
  return absl::StrCat("W", static_cast<int>(workload.kind));
}

absl::Status Validate(const SyntheticOptions& o) {
  absl::Status status = InRange("experts", o.num_experts, 1, 4096);
  status.Update(InRange("ranks", o.num_ranks, 1, 1024));
  status.Update(InRange("tokens", o.tokens_per_rank, 0, int64_t{1} << 30));
  if (!status.ok()) return status;
  return InRange("top_k", o.top_k, 1, std::min(o.num_experts, 64));
}

RoutedCounts SyntheticCounts(const SyntheticOptions& options, int64_t step, int32_t layer) {
  const uint64_t seed = LayerSeed(options, layer);
  const std::vector<double> heat = Heat(options, step, seed);
  const SyntheticKind kind = options.workload.kind;
  if (kind == SyntheticKind::kZipf && step == 0) return ExactZipf(options, heat);
  RoutedCounts out(options.num_ranks, options.num_experts);
  std::vector<double> seen = heat;
  int64_t first = 0;
  for (int32_t s = 0; s < options.num_ranks; ++s) {
    const int64_t tokens = TokensOf(options, s);
    Random random(Mixed(Mixed(seed, static_cast<uint64_t>(step)), static_cast<uint64_t>(s)));
    if (kind != SyntheticKind::kBalanced)
      for (int32_t e = 0; e < options.num_experts; ++e)
        seen[e] = heat[e] * (1 + kNoise * (2 * random.Uniform() - 1));
    const std::vector<int64_t> counts = Deal(seen, tokens, options.top_k, first);
    std::ranges::copy(counts, out.source(s).begin());
    first += tokens * options.top_k % options.num_experts;  // where the next source's ties begin
  }
  return out;
}

}  // namespace lrmoe
