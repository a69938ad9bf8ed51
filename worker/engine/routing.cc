#include "worker/engine/routing.h"

#include <algorithm>
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

std::vector<kernels::Stretch> SendOrder(const LayerPlan& plan, const ForwardRoute& route, int32_t rank) {
  std::vector<kernels::Stretch> stretches;
  stretches.reserve(plan.instances.size());
  int64_t listed = 0;  // instances are by expert
  for (size_t i = 0; i < plan.instances.size(); ++i) {
    const int64_t pairs = plan.instances[i].forward_rows_by_source[rank];
    stretches.push_back({listed, route.first_position[i], pairs});
    listed += pairs;
  }
  return stretches;
}

ForwardRoute RouteForward(const LayerPlan& plan, int32_t rank) {
  const auto num_ranks = static_cast<int32_t>(plan.ranks.size());
  const size_t num_instances = plan.instances.size();
  ForwardRoute route;
  route.send_rows.assign(num_ranks, 0);
  route.recv_rows.assign(num_ranks, 0);
  for (const InstancePlan& instance : plan.instances) {
    route.send_rows[instance.rank_idx] += instance.forward_rows_by_source[rank];
    if (instance.rank_idx != rank) continue;
    for (int32_t s = 0; s < num_ranks; ++s) route.recv_rows[s] += instance.forward_rows_by_source[s];
  }
  std::vector<int64_t> next_to = Offsets(route.send_rows);
  route.first_position.reserve(num_instances);
  for (const InstancePlan& instance : plan.instances) {
    route.first_position.push_back(next_to[instance.rank_idx]);
    next_to[instance.rank_idx] += instance.forward_rows_by_source[rank];
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

}  // namespace lrmoe::engine
