#include "worker/engine/score.h"

#include <bit>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "common/plan_counts.h"
#include "common/random.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

// Calls use(p, draw): a number in [0, 1) for each pair, from the seed, the invocation and the pair alone, not
// from ranks or other pairs.
template <typename Use>
void DrawPairs(const ForwardContext& context, int32_t top_k, size_t num_pairs, const Use& use) {
  const Invocation& invocation = context.plan().invocation;
  Random mixer(context.execution.seed);
  uint64_t seed = mixer.Next();
  for (int64_t part : {invocation.step, int64_t{invocation.layer}, int64_t{invocation.micro_batch}})
    seed = Random(seed ^ static_cast<uint64_t>(part)).Next();
  for (size_t p = 0; p < num_pairs; ++p) {
    const uint64_t pair = static_cast<uint64_t>(context.token_offset) * top_k + p;
    use(p, static_cast<float>(Random(seed ^ (pair * 0x9E3779B97F4A7C15ULL)).Next() >> 40) * 0x1.0p-24F);
  }
}

}  // namespace

absl::Status ScorePairs(EngineState& state, const ForwardContext& context, const std::byte* dy,
                        std::span<float> scores) {
  const int32_t k = state.shape().top_k;
  const Selection selection = context.execution.selection;
  if (selection == Selection::kRandom) {
    DrawPairs(context, k, scores.size(), [&](size_t p, float draw) { scores[p] = draw; });
    return absl::OkStatus();
  }
  LRMOE_ASSIGN_OR_RETURN(Buffer token_value, state.arena->Take(context.num_tokens * 4, "token scores"));
  const auto value = token_value.as<float>();
  if (selection == Selection::kGradAbs)
    state.device->RowAbsSum(state.type(), context.num_tokens, state.shape().hidden_size, dy, value.data());
  else
    state.device->RowNorm2(state.type(), context.num_tokens, state.shape().hidden_size, dy, value.data());
  LRMOE_RETURN_IF_ERROR(state.device->Wait());
  const auto alpha = context.alpha.as<float>(), norm2 = context.norm2.as<float>();
  const bool lrm = selection == Selection::kLrm || selection == Selection::kLrmSampled;
  size_t at = 0;
  for (const float g : value)
    for (const size_t end = at + k; at < end; ++at)
      scores[at] = lrm ? alpha[at] * alpha[at] * g * norm2[at] : g;
  if (selection == Selection::kLrmSampled)
    DrawPairs(context, k, scores.size(),
              [&](size_t p, float draw) { scores[p] = std::sqrt(scores[p]) / (1 - draw); });
  return absl::OkStatus();
}

void ReweighSampled(ForwardContext& context, int32_t top_k, std::span<const int32_t> pair_expert,
                    std::span<const uint8_t> kept, std::span<const float> scores,
                    std::span<const float> dropped) {
  const auto alpha = context.alpha.as<float>();
  DrawPairs(context, top_k, scores.size(), [&](size_t p, float draw) {
    const float size = scores[p] * (1 - draw), least = dropped[pair_expert[p]];
    if (kept[p] && size < least) alpha[p] *= least / size;
  });
}

std::vector<float> RescaleFactors(const LayerPlan& plan) {
  const std::vector<int64_t> routed = RoutedRowsByExpert(plan);
  std::vector<float> factors(plan.quota.size(), 1.0F);
  for (size_t e = 0; e < factors.size(); ++e)
    if (plan.quota[e] > 0)
      factors[e] = static_cast<float>(static_cast<double>(routed[e]) / static_cast<double>(plan.quota[e]));
  return factors;
}

void RescaleKept(ForwardContext& context, std::span<const float> factors,
                 std::span<const int32_t> pair_expert, std::span<const uint8_t> kept) {
  const auto alpha = context.alpha.as<float>();
  for (size_t p = 0; p < kept.size(); ++p)
    if (kept[p]) alpha[p] *= factors[pair_expert[p]];
}

absl::Status CheckFinite(const ForwardContext& context, int32_t rank, int32_t top_k,
                         std::span<const float> scores) {
  // Almost always all are: one look at all exponents, in vectors, before any at one.
  uint32_t bad = 0;
  for (const float score : scores) bad |= (std::bit_cast<uint32_t>(score) & 0x7F800000u) == 0x7F800000u;
  for (size_t p = 0; p < scores.size() && bad != 0; ++p) {
    if (std::isfinite(scores[p])) continue;
    const int32_t expert = context.plan().instances[context.pair_instance.as<int32_t>()[p]].expert_idx;
    return absl::OutOfRangeError(absl::StrCat("the score of rank ", rank, " token ", p / top_k, " slot ",
                                              p % top_k, " (expert ", expert, ") is ", scores[p], " in ",
                                              ToString(context.plan().invocation)));
  }
  return absl::OkStatus();
}

}  // namespace lrmoe::engine
