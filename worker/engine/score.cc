#include "worker/engine/score.h"

#include "absl/strings/str_cat.h"
#include "common/plan_counts.h"
#include "common/random.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

kernels::ScoreKind KindOf(Selection selection) {
  switch (selection) {
    case Selection::kRandom:
      return kernels::ScoreKind::kDraw;
    case Selection::kGradNorm2:
    case Selection::kGradAbs:
      return kernels::ScoreKind::kToken;
    case Selection::kLrmSampled:
      return kernels::ScoreKind::kSampled;
    case Selection::kLrm:
      return kernels::ScoreKind::kProduct;
  }
  return kernels::ScoreKind::kProduct;
}

}  // namespace

DrawSource DrawsOf(const ForwardContext& context, int32_t top_k) {
  const Invocation& invocation = context.plan().invocation;
  uint64_t seed = Random(context.execution.seed).Next();
  for (int64_t part : {invocation.step, int64_t{invocation.layer}, int64_t{invocation.micro_batch}})
    seed = Random(seed ^ static_cast<uint64_t>(part)).Next();
  return {seed, static_cast<uint64_t>(context.token_offset) * static_cast<uint64_t>(top_k)};
}

absl::Status ScorePairs(EngineState& state, const ForwardContext& context, const std::byte* dy,
                        const Buffer& scores, std::span<int64_t> bad_pair) {
  const LayerShape& shape = state.shape();
  const Selection selection = context.execution.selection;
  const DrawSource draws = DrawsOf(context, shape.top_k);
  Buffer token_value;
  if (selection != Selection::kRandom) {
    LRMOE_ASSIGN_OR_RETURN(token_value, state.rows().Take(context.num_tokens * 4, "token scores"));
    float* const value = token_value.as<float>().data();
    if (selection == Selection::kGradAbs)
      state.device->RowAbsSum(state.type(), context.num_tokens, shape.hidden_size, dy, value);
    else
      state.device->RowNorm2(state.type(), context.num_tokens, shape.hidden_size, dy, value);
  }
  state.device->ScorePairs({KindOf(selection), context.num_tokens * shape.top_k, shape.top_k,
                            context.alpha.as<float>().data(), token_value.as<float>().data(),
                            context.norm2.as<float>().data(), context.pair_position.as<int32_t>().data(),
                            draws.seed, draws.first_pair, scores.as<float>().data(), bad_pair});
  return absl::OkStatus();
}

absl::Status CheckFinite(EngineState& state, const ForwardContext& context, int64_t bad_pair,
                         const Buffer& scores) {
  if (bad_pair < 0) return absl::OkStatus();
  int32_t position = 0;
  float score = 0;
  state.device->Download(&position, context.pair_position.as<int32_t>().data() + bad_pair, 4);
  LRMOE_RETURN_IF_ERROR(state.device->Wait());
  state.device->Download(&score, scores.as<float>().data() + position, 4);
  LRMOE_RETURN_IF_ERROR(state.device->Wait());
  const LayerPlan& plan = context.plan();
  const std::vector<int64_t>& first = context.route.first_position;
  size_t i = 0;
  while (position < first[i] || position >= first[i] + plan.instances[i].forward_rows_by_source[state.rank()])
    ++i;
  const int32_t k = state.shape().top_k;
  return absl::OutOfRangeError(absl::StrCat("the score of rank ", state.rank(), " token ", bad_pair / k,
                                            " slot ", bad_pair % k, " (expert ", plan.instances[i].expert_idx,
                                            ") is ", score, " in ", ToString(plan.invocation)));
}

std::vector<float> RescaleFactors(const LayerPlan& plan) {
  const std::vector<int64_t> routed = RoutedRowsByExpert(plan);
  std::vector<float> factors(plan.quota.size(), 1.0F);
  for (size_t e = 0; e < factors.size(); ++e)
    if (plan.quota[e] > 0)
      factors[e] = static_cast<float>(static_cast<double>(routed[e]) / static_cast<double>(plan.quota[e]));
  return factors;
}

}  // namespace lrmoe::engine
