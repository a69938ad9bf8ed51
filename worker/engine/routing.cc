#include "worker/engine/routing.h"

#include <algorithm>
#include <bit>
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

absl::Status Unusable(const LayerPlan& plan, absl::string_view what) {
  return absl::InternalError(
      absl::StrCat("the plan of ", ToString(plan.invocation), " cannot be executed: ", what));
}

absl::Status CheckInstance(const LayerPlan& plan, size_t i, std::span<const int32_t> owner) {
  const InstancePlan& instance = plan.instances[i];
  const auto num_ranks = static_cast<int32_t>(plan.ranks.size());
  const auto bad = [&](absl::string_view what) {
    return Unusable(plan, absl::StrCat("instance ", i, " (expert ", instance.expert_idx, ", rank ",
                                       instance.rank_idx, "): ", what));
  };
  if (instance.expert_idx < 0 || instance.expert_idx >= static_cast<int32_t>(owner.size()))
    return bad(absl::StrCat("expert out of range 0..", owner.size() - 1));
  if (instance.rank_idx < 0 || instance.rank_idx >= num_ranks)
    return bad(absl::StrCat("rank out of range 0..", num_ranks - 1));
  if (instance.owner != (instance.rank_idx == owner[instance.expert_idx]))
    return bad(absl::StrCat("the owner is rank ", owner[instance.expert_idx]));
  if (static_cast<int32_t>(instance.forward_rows_by_source.size()) != num_ranks)
    return bad(absl::StrCat("forward_rows_by_source has ", instance.forward_rows_by_source.size(),
                            " entries for ", num_ranks, " ranks"));
  int64_t sum = 0;
  for (int64_t rows : instance.forward_rows_by_source) {
    if (rows < 0) return bad(absl::StrCat("negative forward rows ", rows));
    sum += rows;
  }
  if (sum != instance.forward_rows)
    return bad(absl::StrCat("forward_rows is ", instance.forward_rows, ", its sources sum to ", sum));
  if (instance.backward_rows < 0) return bad(absl::StrCat("negative backward rows ", instance.backward_rows));
  if (i == 0) return absl::OkStatus();
  const InstancePlan& before = plan.instances[i - 1];
  const bool ordered = before.expert_idx < instance.expert_idx ||
                       (before.expert_idx == instance.expert_idx && !instance.owner &&
                        (before.owner || before.rank_idx < instance.rank_idx));
  return ordered ? absl::OkStatus() : bad("instances are not ordered by (expert, owner first, rank)");
}

// An instance that pairs of this source go to, in their order.
struct Filling {
  int32_t instance_idx = 0;
  int32_t left = 0;      // pairs that it still takes
  int32_t position = 0;  // of its next one, in send order
};

}  // namespace

int64_t Sum(std::span<const int64_t> values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

std::vector<int64_t> Offsets(std::span<const int64_t> values) {
  std::vector<int64_t> out(values.size() + 1, 0);
  std::partial_sum(values.begin(), values.end(), out.begin() + 1);
  return out;
}

absl::Status CheckExecutable(const LayerPlan& plan, std::span<const int32_t> owner, int32_t rank,
                             std::span<const int64_t> counts) {
  if (plan.quota.size() != owner.size())
    return Unusable(plan,
                    absl::StrCat("quota has ", plan.quota.size(), " entries for ", owner.size(), " experts"));
  if (rank >= static_cast<int32_t>(plan.ranks.size()))
    return Unusable(plan, absl::StrCat("it covers ", plan.ranks.size(), " ranks, this is rank ", rank));
  std::vector<int64_t> mine(owner.size(), 0), forward(owner.size(), 0), backward(owner.size(), 0);
  for (size_t i = 0; i < plan.instances.size(); ++i) {
    LRMOE_RETURN_IF_ERROR(CheckInstance(plan, i, owner));
    const InstancePlan& instance = plan.instances[i];
    mine[instance.expert_idx] += instance.forward_rows_by_source[rank];
    forward[instance.expert_idx] += instance.forward_rows;
    backward[instance.expert_idx] += instance.backward_rows;
  }
  for (size_t e = 0; e < owner.size(); ++e) {
    if (mine[e] != counts[e])
      return Unusable(plan, absl::StrCat("rank ", rank, " routed ", counts[e], " pairs to expert ", e,
                                         ", the plan counts ", mine[e]));
    if (plan.quota[e] < 0 || plan.quota[e] > forward[e])
      return Unusable(
          plan, absl::StrCat("quota of expert ", e, " is ", plan.quota[e], "; allowed: 0..", forward[e]));
    if (backward[e] != plan.quota[e])
      return Unusable(plan, absl::StrCat("backward rows of expert ", e, " sum to ", backward[e],
                                         ", its quota is ", plan.quota[e]));
  }
  return absl::OkStatus();
}

ForwardRoute RouteForward(const LayerPlan& plan, std::span<const int32_t> expert_idx, int32_t rank,
                          std::span<int32_t> pair_instance, std::span<int32_t> pair_position) {
  const auto num_ranks = static_cast<int32_t>(plan.ranks.size());
  const size_t num_instances = plan.instances.size();
  ForwardRoute route;
  route.send_rows.assign(num_ranks, 0);
  route.recv_rows.assign(num_ranks, 0);

  // As a source: the instances of each rank, in plan order, get consecutive stretches of the send order.
  std::vector<Filling> filling(num_instances);
  for (size_t i = 0; i < num_instances; ++i) {
    const InstancePlan& instance = plan.instances[i];
    filling[i] = {static_cast<int32_t>(i), static_cast<int32_t>(instance.forward_rows_by_source[rank]), 0};
    route.send_rows[instance.rank_idx] += filling[i].left;
  }
  std::vector<int64_t> next_in_rank = Offsets(route.send_rows);
  std::vector<Filling> current(plan.quota.size());  // of the instance that takes the expert's next pair
  for (size_t i = 0; i < num_instances; ++i) {
    int64_t& next = next_in_rank[plan.instances[i].rank_idx];
    filling[i].position = static_cast<int32_t>(next);
    next += filling[i].left;
    Filling& first = current[plan.instances[i].expert_idx];
    if (first.left == 0) first = filling[i];
  }
  for (size_t p = 0; p < expert_idx.size(); ++p) {
    Filling& to = current[expert_idx[p]];
    while (to.left == 0) to = filling[to.instance_idx + 1];  // the counts match: one with room follows
    --to.left;
    pair_instance[p] = to.instance_idx;
    pair_position[p] = to.position++;
  }

  // As an executor.
  for (size_t i = 0; i < num_instances; ++i) {
    const InstancePlan& instance = plan.instances[i];
    if (instance.rank_idx != rank) continue;
    for (int32_t s = 0; s < num_ranks; ++s) route.recv_rows[s] += instance.forward_rows_by_source[s];
  }
  std::vector<int64_t> next_from = Offsets(route.recv_rows);
  route.rows = next_from[num_ranks];
  int64_t row = 0;
  for (size_t i = 0; i < num_instances; ++i) {
    const InstancePlan& instance = plan.instances[i];
    if (instance.rank_idx != rank) continue;
    const auto local_idx = static_cast<int32_t>(route.local.size());
    route.local.push_back({static_cast<int32_t>(i), instance.expert_idx, row, instance.forward_rows});
    for (int32_t s = 0; s < num_ranks; ++s) {
      const int64_t count = instance.forward_rows_by_source[s];
      if (count == 0) continue;
      route.runs.push_back({local_idx, s, row, next_from[s], count});
      row += count;
      next_from[s] += count;
    }
  }
  return route;
}

std::vector<int32_t> ReturnPieces(const LayerPlan& plan, int64_t hidden_size, int64_t intermediate_size,
                                  int64_t least_rows) {
  std::vector<int32_t> piece(plan.instances.size(), 0);
  const auto divide = [&](int32_t rank, int64_t rows, int64_t pieces) {
    std::vector<int64_t> size(pieces, 0);
    int64_t behind = 0;  // rows of later instances
    for (size_t i = plan.instances.size(); i-- > 0;) {
      const InstancePlan& instance = plan.instances[i];
      if (instance.rank_idx != rank) continue;
      const int64_t middle = behind + instance.forward_rows / 2;
      piece[i] = static_cast<int32_t>(std::min(middle * pieces / rows, pieces - 1));
      size[piece[i]] += instance.forward_rows;
      behind += instance.forward_rows;
    }
    bool fits = true;
    int64_t left = rows - size[0];  // whose activated rows are still there
    for (int64_t c = 1; c < pieces; left -= size[c++])
      fits = fits && (size[c - 1] + size[c]) * hidden_size + left * intermediate_size <= rows * hidden_size;
    return fits;
  };
  for (int32_t rank = 0; rank < static_cast<int32_t>(plan.ranks.size()); ++rank) {
    int64_t rows = 0;
    for (const InstancePlan& instance : plan.instances)
      if (instance.rank_idx == rank) rows += instance.forward_rows;
    int64_t pieces = std::min<int64_t>(kMaxPieces, rows / least_rows);
    while (pieces > 1 && !divide(rank, rows, pieces)) --pieces;
    if (pieces <= 1 && rows > 0) divide(rank, rows, 1);
  }
  return piece;
}

// Which pairs travel, and how many of a token's go to one rank, no branch predictor knows: every pair takes
// the same way, and the ranks that a token goes to are bits of a word, 64 ranks at a time.
Payload PackPayload(const LayerPlan& plan, std::span<const int32_t> pair_target, int32_t top_k,
                    std::span<const int64_t> pairs_to, std::span<int32_t> token,
                    std::span<int32_t> pair_row) {
  const auto num_ranks = static_cast<int32_t>(pairs_to.size());
  // A rank's tokens are not more than its pairs: written where those would be, then brought together.
  const std::vector<int64_t> room = Offsets(pairs_to);
  LRMOE_CHECK_LE(room[num_ranks], static_cast<int64_t>(token.size()));
  std::vector<int32_t> rank_of(plan.instances.size() + 1, -1);  // by target + 1
  for (size_t i = 0; i < plan.instances.size(); ++i) rank_of[i + 1] = plan.instances[i].rank_idx;
  std::vector<int32_t> count(num_ranks + 1, 0);  // by rank + 1
  const auto num_tokens = static_cast<int32_t>(pair_target.size() / top_k);
  for (int32_t first = 0; first < num_ranks; first += 64) {
    const int32_t* target = pair_target.data();
    int32_t* row = pair_row.data();
    for (int32_t t = 0; t < num_tokens; ++t) {
      uint64_t ranks = 0;
      for (int32_t slot = 0; slot < top_k; ++slot, ++target, ++row) {
        const int32_t rank = rank_of[*target + 1];
        const auto bit = static_cast<uint32_t>(rank - first);
        // All ones for one of these 64, else 0: from a comparison the compiler would make a branch.
        const auto here = static_cast<int32_t>((int64_t{bit} - 64) >> 32);
        const int32_t otherwise = first == 0 ? -1 : *row;
        *row = (count[rank + 1] & here) | (otherwise & ~here);
        ranks |= static_cast<uint64_t>(here & 1) << (bit % 64);
      }
      for (; ranks != 0; ranks &= ranks - 1) {
        const int32_t rank = first + std::countr_zero(ranks);
        token[room[rank] + count[rank + 1]++] = t;
      }
    }
  }
  Payload payload;
  for (int32_t rank = 0; rank < num_ranks; ++rank) {
    const int64_t rows = count[rank + 1];
    LRMOE_CHECK_LE(rows, pairs_to[rank]);
    std::copy_n(token.begin() + room[rank], rows, token.begin() + payload.total);
    payload.rows.push_back(rows);
    payload.total += rows;
  }
  return payload;
}

}  // namespace lrmoe::engine
