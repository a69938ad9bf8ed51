#include "worker/engine/select.h"

#include <algorithm>
#include <bit>
#include <limits>

#include "common/check.h"
#include "common/plan_counts.h"
#include "common/status_macros.h"
#include "kernels/kernels.h"
#include "worker/engine/routing.h"

namespace lrmoe::engine {
namespace {

// Selective experts of one exchange: pairs of expert e from source s, and where the stretches lie.
struct ScoreLayout {
  std::vector<int32_t> experts;                    // selective, ascending
  std::vector<int64_t> pairs;                      // [experts.size() * G] pairs of (expert, source)
  std::vector<int64_t> send_rows, recv_rows;       // [G] scores to each owner, from each source
  std::vector<int64_t> verdicts_out, verdicts_in;  // [G] verdicts this owner sends, this source gets
};

ScoreLayout LayOut(const LayerPlan& plan, std::span<const int32_t> owner, int32_t rank) {
  const auto num_ranks = static_cast<int32_t>(plan.ranks.size());
  const std::vector<bool> selective = SelectiveExperts(plan);
  ScoreLayout layout;
  std::vector<int32_t> index(owner.size(), -1);
  for (size_t e = 0; e < owner.size(); ++e) {
    if (!selective[e]) continue;
    index[e] = static_cast<int32_t>(layout.experts.size());
    layout.experts.push_back(static_cast<int32_t>(e));
  }
  layout.pairs.assign(layout.experts.size() * num_ranks, 0);
  for (const InstancePlan& instance : plan.instances) {
    if (index[instance.expert_idx] < 0) continue;
    for (int32_t s = 0; s < num_ranks; ++s)
      layout.pairs[static_cast<size_t>(index[instance.expert_idx]) * num_ranks + s] +=
          instance.forward_rows_by_source[s];
  }
  layout.send_rows.assign(num_ranks, 0);
  layout.recv_rows.assign(num_ranks, 0);
  layout.verdicts_out.assign(num_ranks, 0);
  layout.verdicts_in.assign(num_ranks, 0);
  for (size_t j = 0; j < layout.experts.size(); ++j) {
    const int32_t to = owner[layout.experts[j]];
    const int64_t mine = layout.pairs[j * num_ranks + rank];
    layout.send_rows[to] += mine;
    layout.verdicts_in[to] += mine > 0;
    if (to != rank) continue;
    for (int32_t s = 0; s < num_ranks; ++s) {
      layout.recv_rows[s] += layout.pairs[j * num_ranks + s];
      layout.verdicts_out[s] += layout.pairs[j * num_ranks + s] > 0;
    }
  }
  return layout;
}

// Owner: merges the sources' scores of each of its experts, selects, and lays the verdicts out by (source,
// expert).
absl::StatusOr<std::vector<Verdict>> JudgeOwned(const ScoreLayout& layout, Arena& arena,
                                                std::span<const int32_t> owner, int32_t rank,
                                                std::span<const int64_t> quota,
                                                std::span<const float> received) {
  const size_t num_ranks = layout.recv_rows.size();
  std::vector<int64_t> next_score(num_ranks, 0), next_verdict(num_ranks, 0);
  int64_t scores_before = 0, verdicts_before = 0;
  for (size_t s = 0; s < num_ranks; ++s) {
    next_score[s] = scores_before;
    next_verdict[s] = verdicts_before;
    scores_before += layout.recv_rows[s];
    verdicts_before += layout.verdicts_out[s];
  }
  std::vector<Verdict> out(verdicts_before);
  const auto counts_of = [&](size_t j) { return std::span(layout.pairs).subspan(j * num_ranks, num_ranks); };
  int64_t largest = 0;
  for (size_t j = 0; j < layout.experts.size(); ++j)
    if (owner[layout.experts[j]] == rank) largest = std::max(largest, Sum(counts_of(j)));
  LRMOE_ASSIGN_OR_RETURN(const Buffer merged, arena.Take(largest * 4, "scores of an expert"));
  LRMOE_ASSIGN_OR_RETURN(const Buffer scratch, arena.Take(largest * 4, "scores of an expert"));
  for (size_t j = 0; j < layout.experts.size(); ++j) {
    const int32_t e = layout.experts[j];
    if (owner[e] != rank) continue;
    const std::span<const int64_t> counts = counts_of(j);
    auto end = merged.as<float>().begin();
    for (size_t s = 0; s < num_ranks; ++s) {
      end = std::copy_n(received.begin() + next_score[s], counts[s], end);
      next_score[s] += counts[s];
    }
    const std::vector<Verdict> verdicts =
        SelectExpert({merged.as<float>().begin(), end}, counts, quota[e], scratch.as<uint32_t>());
    for (size_t s = 0; s < num_ranks; ++s)
      if (counts[s] > 0) out[next_verdict[s]++] = verdicts[s];
  }
  return out;
}

}  // namespace

std::vector<Verdict> SelectExpert(std::span<const float> scores, std::span<const int64_t> counts,
                                  int64_t quota, std::span<uint32_t> scratch) {
  const kernels::TopK top = kernels::SelectTopK(scores, quota, scratch);
  // By bit patterns, which order as the scores do: the compiler makes vectors of these loops.
  const auto threshold = std::bit_cast<int32_t>(top.threshold);
  int32_t below = 0;
  int64_t equal = 0;
  for (float score : scores) {
    const int32_t bits = std::bit_cast<int32_t>(score) & INT32_MAX;
    below = std::max(below, bits < threshold ? bits : 0);
    equal += bits == threshold;
  }
  const float dropped = equal > top.ties ? top.threshold : std::bit_cast<float>(below);
  std::vector<Verdict> verdicts(counts.size());
  int64_t ties = top.ties;
  size_t next = 0;
  for (size_t s = 0; s < counts.size(); ++s) {
    int64_t here = 0;
    if (ties > 0) {
      for (int64_t i = 0; i < counts[s]; ++i) here += scores[next + i] == top.threshold;
      here = std::min(here, ties);
    }
    verdicts[s] = {top.threshold, static_cast<int32_t>(here), dropped};
    ties -= here;
    next += counts[s];
  }
  LRMOE_CHECK_EQ(ties, 0);
  return verdicts;
}

void MarkKept(std::span<const int32_t> pair_expert, std::span<const float> pair_score,
              std::span<Verdict> verdicts, std::span<uint8_t> kept) {
  for (size_t p = 0; p < kept.size(); ++p) {
    Verdict& verdict = verdicts[pair_expert[p]];
    kept[p] = pair_score[p] > verdict.threshold;
    if (pair_score[p] == verdict.threshold && verdict.ties > 0) {  // rare
      --verdict.ties;
      kept[p] = 1;
    }
  }
}

std::vector<bool> SelectiveExperts(const LayerPlan& plan) {
  const std::vector<int64_t> routed = RoutedRowsByExpert(plan);
  std::vector<bool> out(plan.quota.size());
  for (size_t e = 0; e < out.size(); ++e) out[e] = plan.quota[e] > 0 && plan.quota[e] < routed[e];
  return out;
}

absl::StatusOr<std::vector<float>> SelectPairs(Exchange& exchange, Arena& arena, const LayerPlan& plan,
                                               std::span<const int32_t> owner,
                                               std::span<const int32_t> pair_expert,
                                               std::span<const float> pair_score, std::span<uint8_t> kept) {
  const ScoreLayout layout = LayOut(plan, owner, exchange.rank());
  std::vector<float> dropped(owner.size(), 0.0F);
  if (layout.experts.empty()) {
    for (size_t p = 0; p < kept.size(); ++p) kept[p] = plan.quota[pair_expert[p]] > 0;
    return dropped;
  }

  // Scores in (owner, expert, token, slot) order. Those of other experts go to the place behind the last.
  const auto num_ranks = static_cast<size_t>(exchange.num_ranks());
  std::vector<size_t> by_owner(layout.experts.size());
  for (size_t j = 0; j < by_owner.size(); ++j) by_owner[j] = j;
  std::stable_sort(by_owner.begin(), by_owner.end(),
                   [&](size_t a, size_t b) { return owner[layout.experts[a]] < owner[layout.experts[b]]; });
  struct Place {
    int32_t next, step;
  };
  const auto total = static_cast<int32_t>(Sum(layout.send_rows));
  std::vector<Place> places(owner.size(), {total, 0});
  int32_t before = 0;
  for (size_t j : by_owner) {
    places[layout.experts[j]] = {before, 1};
    before += static_cast<int32_t>(layout.pairs[j * num_ranks + exchange.rank()]);
  }
  LRMOE_ASSIGN_OR_RETURN(const Buffer sorted_scores, arena.Take((total + 1) * 4, "scores by expert"));
  const auto scores = sorted_scores.as<float>();
  for (size_t p = 0; p < pair_expert.size(); ++p) {
    Place& place = places[pair_expert[p]];
    scores[place.next] = pair_score[p];
    place.next += place.step;
  }

  LRMOE_ASSIGN_OR_RETURN(const Buffer received, arena.Take(Sum(layout.recv_rows) * 4, "received scores"));
  LRMOE_RETURN_IF_ERROR(exchange.Rows("backward scores", std::as_bytes(scores.first(total)), layout.send_rows,
                                      received.bytes(), layout.recv_rows, sizeof(float)));
  LRMOE_ASSIGN_OR_RETURN(const std::vector<Verdict> out,
                         JudgeOwned(layout, arena, owner, exchange.rank(), plan.quota, received.as<float>()));
  std::vector<Verdict> in(Sum(layout.verdicts_in));
  LRMOE_RETURN_IF_ERROR(exchange.Rows("backward thresholds", std::as_bytes(std::span(out)),
                                      layout.verdicts_out, std::as_writable_bytes(std::span(in)),
                                      layout.verdicts_in, sizeof(Verdict)));

  // Of experts that keep all or none: below any score, above any score.
  std::vector<Verdict> verdicts(owner.size());
  for (size_t e = 0; e < verdicts.size(); ++e)
    verdicts[e].threshold = plan.quota[e] > 0 ? -1.0F : std::numeric_limits<float>::infinity();
  size_t next_verdict = 0;
  for (size_t j : by_owner) {
    if (layout.pairs[j * num_ranks + exchange.rank()] == 0) continue;
    const Verdict& verdict = in[next_verdict++];
    dropped[layout.experts[j]] = verdict.dropped;
    verdicts[layout.experts[j]] = verdict;
  }
  MarkKept(pair_expert, pair_score, verdicts, kept);
  return dropped;
}

}  // namespace lrmoe::engine
