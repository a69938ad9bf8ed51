#include "tools/bench/wire_model.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "common/check.h"
#include "common/cluster.h"
#include "common/memory_model.h"

namespace lrmoe::bench {
namespace {

struct Pair {
  int32_t source;
  int64_t token;
  int32_t expert;
  bool kept;
  size_t forward;       // instance
  size_t backward = 0;  // instance, when kept
};

// Every pair, in (source, token, slot) order, with its forward instance: an expert's instances are filled in
// plan order, as far as forward_rows_by_source says.
std::vector<Pair> Place(const WireInput& input) {
  const LayerPlan& plan = input.execution->plan;
  std::vector<Pair> pairs;
  for (size_t s = 0; s < input.expert_idx.size(); ++s) {
    std::vector<int64_t> left;
    for (const InstancePlan& instance : plan.instances) left.push_back(instance.forward_rows_by_source[s]);
    for (size_t p = 0; p < input.expert_idx[s].size(); ++p) {
      const int32_t e = input.expert_idx[s][p];
      size_t i = 0;
      while (plan.instances[i].expert_idx != e || left[i] == 0) ++i;
      --left[i];
      pairs.push_back({static_cast<int32_t>(s), static_cast<int64_t>(p) / input.shape->top_k, e,
                       input.kept[s][p] != 0, i});
    }
  }
  return pairs;
}

// A kept pair stays at its forward instance while that has room; the last ones move to the expert's instance
// with room on the lowest rank.
void PlaceBackward(const LayerPlan& plan, std::vector<Pair>& pairs) {
  std::vector<int64_t> room;
  for (const InstancePlan& instance : plan.instances) room.push_back(instance.backward_rows);
  std::vector<std::vector<Pair*>> moving(plan.instances.size());
  for (Pair& pair : pairs) {
    if (!pair.kept) continue;
    pair.backward = pair.forward;
    if (room[pair.forward] > 0)
      --room[pair.forward];
    else
      moving[pair.forward].push_back(&pair);
  }
  for (auto& list : moving) {
    for (Pair* pair : list) {
      size_t best = plan.instances.size();
      for (size_t i = 0; i < plan.instances.size(); ++i) {
        if (plan.instances[i].expert_idx != pair->expert || room[i] == 0) continue;
        if (best == plan.instances.size() || plan.instances[i].rank_idx < plan.instances[best].rank_idx)
          best = i;
      }
      LRMOE_CHECK_LT(best, plan.instances.size());
      pair->backward = best;
      --room[best];
    }
  }
}

int64_t MaskBytes(int64_t kept, int64_t routed) {
  return kept > 0 && kept < routed ? (routed + 7) / 8 : 0;
}

// Of the backward pass: scores to owners and thresholds back, kept counts, masks to forward executors.
void CountSelection(const WireInput& input, const std::vector<Pair>& pairs, std::vector<RankWire>& out) {
  const LayerPlan& plan = input.execution->plan;
  const auto num_ranks = static_cast<int32_t>(out.size());
  const std::vector<int32_t> owner = ContiguousOwners(input.shape->num_experts, num_ranks);
  std::vector<int64_t> routed(plan.quota.size(), 0);
  for (const Pair& pair : pairs) ++routed[pair.expert];
  const auto selective = [&](int32_t e) { return plan.quota[e] > 0 && plan.quota[e] < routed[e]; };
  std::set<std::pair<int32_t, int32_t>> asked;  // (source, expert)
  std::map<std::pair<int32_t, size_t>, int64_t> kept_at;
  for (const Pair& pair : pairs) {
    if (pair.kept) ++kept_at[{pair.source, pair.forward}];
    if (!selective(pair.expert)) continue;
    asked.insert({pair.source, pair.expert});
    if (owner[pair.expert] != pair.source) out[pair.source].backward.scalars += 4;
  }
  for (const auto& [source, expert] : asked)
    if (owner[expert] != source)
      out[owner[expert]].backward.scalars += 12;  // threshold, ties, largest dropped
  for (int32_t s = 0; s < num_ranks; ++s) {
    if (!asked.empty())
      out[s].backward.scalars += 4 * static_cast<int64_t>(plan.instances.size() + 1) * (num_ranks - 1);
    std::vector<int64_t> masks(num_ranks, 0);
    for (size_t i = 0; i < plan.instances.size(); ++i)
      masks[plan.instances[i].rank_idx] +=
          MaskBytes(kept_at[{s, i}], plan.instances[i].forward_rows_by_source[s]);
    for (int32_t to = 0; to < num_ranks; ++to)
      if (to != s) out[s].backward.scalars += (masks[to] + 7) / 8 * 8;
  }
}

}  // namespace

std::vector<RankWire> ExpectedWire(const WireInput& input) {
  const LayerPlan& plan = input.execution->plan;
  const LayerShape& shape = *input.shape;
  const int64_t row = shape.hidden_size * SizeInBytes(shape.dtype);
  const int64_t saved = row + (input.recompute_activation ? 0 : shape.fc1_width() * SizeInBytes(shape.dtype));
  const bool exact = input.execution->router_gradient == RouterGradient::kExact;
  std::vector<RankWire> out(plan.ranks.size());
  std::vector<Pair> pairs = Place(input);
  PlaceBackward(plan, pairs);

  std::set<std::tuple<int32_t, int64_t, int32_t>> forward_rows, backward_rows;  // (source, token, rank)
  for (const Pair& pair : pairs) {
    const int32_t at = plan.instances[pair.forward].rank_idx;
    if (at != pair.source) {
      forward_rows.insert({pair.source, pair.token, at});
      out[pair.source].forward.scalars += 4;  // place in the payload
      out[at].forward.return_ += row;         // y
      out[at].forward.scalars += 4;           // ||phi||^2
    }
    if (!pair.kept) continue;
    const int32_t to = plan.instances[pair.backward].rank_idx;
    if (to != at) out[at].backward.dispatch += saved;
    if (to == pair.source) continue;
    backward_rows.insert({pair.source, pair.token, to});
    out[pair.source].backward.scalars += 8;     // place in the payload, alpha
    if (!exact) out[to].backward.scalars += 4;  // d(alpha)
  }
  for (const auto& [source, token, at] : forward_rows) out[source].forward.dispatch += row;
  for (const auto& [source, token, at] : backward_rows) {
    out[source].backward.dispatch += row;
    out[at].backward.return_ += row;
  }
  CountSelection(input, pairs, out);

  const int64_t blocks =
      (shape.parameters_per_expert() + kExchangeBlockElements - 1) / kExchangeBlockElements;
  for (const InstancePlan& instance : plan.instances)
    if (!instance.owner && instance.backward_rows > 0)
      out[instance.rank_idx].backward.gradients += blocks * kExchangeBlockElements * 4;
  return out;
}

}  // namespace lrmoe::bench
