#include "worker/engine/select.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "common/plan_counts.h"
#include "common/status_macros.h"
#include "worker/engine/routing.h"
#include "worker/engine/score.h"

namespace lrmoe::engine {

using kernels::KeepRule;
using kernels::Range;

std::vector<bool> SelectiveExperts(const LayerPlan& plan) {
  const std::vector<int64_t> routed = RoutedRowsByExpert(plan);
  std::vector<bool> out(plan.quota.size());
  for (size_t e = 0; e < out.size(); ++e) out[e] = plan.quota[e] > 0 && plan.quota[e] < routed[e];
  return out;
}

Selector::Selector(EngineState& state, Exchange& exchange, ForwardContext& context)
    : state_(state),
      exchange_(exchange),
      context_(context),
      plan_(context.plan()),
      first_instance_(plan_.quota.size() + 1, 0),
      verdict_of_(plan_.quota.size()) {
  for (const InstancePlan& instance : plan_.instances) ++first_instance_[instance.expert_idx + 1];
  std::partial_sum(first_instance_.begin(), first_instance_.end(), first_instance_.begin());
  for (size_t e = 0; e < verdict_of_.size(); ++e)
    verdict_of_[e] = plan_.quota[e] > 0 ? KeepRule::kAll : KeepRule::kNone;
}

// The device may still have to write what it counted.
Selector::~Selector() {
  if (!selected_.num_kept.empty()) (void)state_.device->Wait();
}

Range Selector::PairsHere(size_t instance_idx) const {
  return {context_.route.first_position[instance_idx],
          plan_.instances[instance_idx].forward_rows_by_source[state_.rank()]};
}

Selector::Layout Selector::LayOut() const {
  const auto num_ranks = static_cast<size_t>(state_.num_ranks());
  const std::span<const int32_t> owner = state_.store->owner();
  const std::vector<bool> selective = SelectiveExperts(plan_);
  Layout layout;
  for (size_t e = 0; e < selective.size(); ++e)
    if (selective[e]) layout.experts.push_back(static_cast<int32_t>(e));
  std::stable_sort(layout.experts.begin(), layout.experts.end(),
                   [&](int32_t a, int32_t b) { return owner[a] < owner[b]; });
  layout.pairs.assign(layout.experts.size() * num_ranks, 0);
  for (auto* rows : {&layout.send_rows, &layout.recv_rows, &layout.verdicts_out, &layout.verdicts_in})
    rows->assign(num_ranks, 0);
  for (size_t j = 0; j < layout.experts.size(); ++j) {
    const int32_t e = layout.experts[j], to = owner[e];
    const std::span<int64_t> pairs = std::span(layout.pairs).subspan(j * num_ranks, num_ranks);
    for (int32_t i = first_instance_[e]; i < first_instance_[e + 1]; ++i)
      for (size_t s = 0; s < num_ranks; ++s) pairs[s] += plan_.instances[i].forward_rows_by_source[s];
    layout.send_rows[to] += pairs[state_.rank()];
    layout.verdicts_in[to] += pairs[state_.rank()] > 0;
    if (to != state_.rank()) continue;
    for (size_t s = 0; s < num_ranks; ++s) {
      layout.recv_rows[s] += pairs[s];
      layout.verdicts_out[s] += pairs[s] > 0;
    }
    layout.most_pairs = std::max(layout.most_pairs, Sum(pairs));
  }
  return layout;
}

absl::Status Selector::Select(const Buffer& scores) {
  const Layout layout = LayOut();
  if (!layout.experts.empty()) LRMOE_RETURN_IF_ERROR(ExchangeScores(layout, scores));

  Arena& arena = state_.rows();
  const auto position = context_.pair_position.as<int32_t>();
  const auto pairs = static_cast<int64_t>(position.size());
  LRMOE_ASSIGN_OR_RETURN(pair_, arena.Take(pairs * 4, "pairs by position"));
  state_.device->Invert(pairs, position.data(), pair_.as<int32_t>().data());
  LRMOE_ASSIGN_OR_RETURN(selected_.kept, arena.Take(pairs, "kept pairs"));
  LRMOE_ASSIGN_OR_RETURN(selected_.kept_pair, arena.Take(pairs * 4, "kept pairs"));
  std::vector<KeepRule> rules;
  rules.reserve(verdict_of_.size());
  for (size_t e = 0; e < verdict_of_.size(); ++e)
    rules.push_back({verdict_of_[e], first_instance_[e], first_instance_[e + 1] - first_instance_[e]});
  std::vector<Range> ranges;
  ranges.reserve(plan_.instances.size());
  for (size_t i = 0; i < plan_.instances.size(); ++i) ranges.push_back(PairsHere(i));
  selected_.num_kept.assign(ranges.size(), 0);
  if (!layout.experts.empty()) {
    total_score_.assign(ranges.size(), 0);
    kept_score_.assign(ranges.size(), 0);
  }
  state_.device->KeepPairs(
      {rules, ranges, scores.as<float>().data(), reinterpret_cast<const kernels::Verdict*>(verdicts_.data()),
       pair_.as<int32_t>().data(), selected_.kept.as<uint8_t>().data(),
       selected_.kept_pair.as<int32_t>().data(), selected_.num_kept, total_score_, kept_score_});
  return absl::OkStatus();
}

// Scores to the owners, in (owner, expert, token, slot) order, and their verdicts back in (owner, expert)
// order.
absl::Status Selector::ExchangeScores(const Layout& layout, const Buffer& scores) {
  Arena& arena = state_.rows();
  constexpr auto kVerdictBytes = static_cast<int64_t>(sizeof(kernels::Verdict));
  LRMOE_ASSIGN_OR_RETURN(Buffer received, arena.Take(Sum(layout.recv_rows) * 4, "received scores"));
  {
    LRMOE_ASSIGN_OR_RETURN(Buffer sorted, arena.Take(Sum(layout.send_rows) * 4, "scores by expert"));
    std::vector<kernels::Stretch> stretches;
    stretches.reserve(plan_.instances.size());
    int64_t next = 0;
    for (const int32_t e : layout.experts) {
      for (int32_t i = first_instance_[e]; i < first_instance_[e + 1]; ++i) {
        const Range pairs = PairsHere(i);
        stretches.push_back({pairs.begin, next, pairs.count});
        next += pairs.count;
      }
    }
    state_.device->CopyStretches(stretches, scores.data(), sorted.data());
    LRMOE_RETURN_IF_ERROR(exchange_.Rows("backward scores", sorted.bytes(), layout.send_rows,
                                         received.bytes(), layout.recv_rows, sizeof(float)));
  }
  LRMOE_ASSIGN_OR_RETURN(Buffer out, arena.Take(Sum(layout.verdicts_out) * kVerdictBytes, "thresholds"));
  {
    LRMOE_ASSIGN_OR_RETURN(Buffer scratch, arena.Take(layout.most_pairs * 4, "scores of an expert"));
    Judge(layout, received, scratch, out);
  }
  LRMOE_ASSIGN_OR_RETURN(verdicts_, arena.Take(Sum(layout.verdicts_in) * kVerdictBytes, "thresholds"));
  LRMOE_RETURN_IF_ERROR(exchange_.Rows("backward thresholds", out.bytes(), layout.verdicts_out,
                                       verdicts_.bytes(), layout.verdicts_in, kVerdictBytes));
  int32_t next = 0;
  for (size_t j = 0; j < layout.experts.size(); ++j)
    if (layout.pairs[j * state_.num_ranks() + state_.rank()] > 0) verdict_of_[layout.experts[j]] = next++;
  return absl::OkStatus();
}

// As an owner: received scores are by (source, expert), and so are the verdicts.
void Selector::Judge(const Layout& layout, const Buffer& received, const Buffer& scratch,
                     const Buffer& verdicts) {
  const auto num_ranks = static_cast<size_t>(state_.num_ranks());
  std::vector<int64_t> next_score = Offsets(layout.recv_rows), next_verdict = Offsets(layout.verdicts_out);
  std::vector<kernels::ScoredExpert> experts;
  std::vector<Range> ranges;
  std::vector<int32_t> verdict;
  experts.reserve(layout.experts.size());
  ranges.reserve(layout.pairs.size());
  verdict.reserve(layout.pairs.size());
  for (size_t j = 0; j < layout.experts.size(); ++j) {
    const int32_t e = layout.experts[j];
    if (state_.store->owner()[e] != state_.rank()) continue;
    experts.push_back({plan_.quota[e], static_cast<int32_t>(ranges.size()), 0});
    for (size_t s = 0; s < num_ranks; ++s) {
      const int64_t count = layout.pairs[j * num_ranks + s];
      if (count == 0) continue;
      ranges.push_back({next_score[s], count});
      verdict.push_back(static_cast<int32_t>(next_verdict[s]++));
      next_score[s] += count;
      ++experts.back().num_ranges;
    }
  }
  state_.device->FindThresholds({experts, ranges, verdict, received.as<float>().data(),
                                 scratch.as<uint32_t>().data(),
                                 reinterpret_cast<kernels::Verdict*>(verdicts.data())});
}

void Selector::CorrectWeights(const Buffer& scores) {
  const bool sampled = context_.execution.selection == Selection::kLrmSampled;
  const bool rescaled = context_.execution.rescale == Rescale::kRows;
  if (!sampled && !rescaled) return;
  const std::vector<float> factor = RescaleFactors(plan_);
  std::vector<kernels::WeightRule> rules;
  for (size_t i = 0; i < plan_.instances.size(); ++i) {
    const int32_t e = plan_.instances[i].expert_idx;
    rules.push_back({PairsHere(i), rescaled ? factor[e] : 1.0F, sampled ? std::max(verdict_of_[e], -1) : -1});
  }
  const DrawSource draws = DrawsOf(context_, state_.shape().top_k);
  state_.device->WeighPairs({rules, draws.seed, draws.first_pair,
                             reinterpret_cast<const kernels::Verdict*>(verdicts_.data()),
                             scores.as<float>().data(), selected_.kept.as<uint8_t>().data(),
                             pair_.as<int32_t>().data(), context_.alpha.as<float>().data()});
}

absl::StatusOr<SelectedPairs> Selector::Finish() {
  if (!total_score_.empty()) LRMOE_RETURN_IF_ERROR(state_.device->Wait());
  selected_.total_score = std::accumulate(total_score_.begin(), total_score_.end(), 0.0);
  selected_.kept_score = std::accumulate(kept_score_.begin(), kept_score_.end(), 0.0);
  verdicts_.Release();
  pair_.Release();
  return std::exchange(selected_, {});
}

}  // namespace lrmoe::engine
