#include "controller/planner/placed_rows.h"

#include <algorithm>

namespace lrmoe::planner {

PlacedRows FromFlow(const Workload& work, const RowFlow& flow) {
  PlacedRows out;
  out.first.reserve(work.num_experts + 1);
  const size_t bound = flow.end_instance();
  out.expert.reserve(bound);
  out.rank.reserve(bound);
  out.is_new.reserve(bound);
  out.forward.reserve(bound);
  out.replicas.assign(work.num_ranks, 0);
  std::vector<std::pair<int32_t, int64_t>> replicas;
  for (int32_t e = 0; e < work.num_experts; ++e) {
    out.first.push_back(out.size());
    const auto push = [&](int32_t rank, int64_t rows, bool is_new) {
      out.expert.push_back(e);
      out.rank.push_back(rank);
      out.forward.push_back(rows);
      out.is_new.push_back(is_new);
      out.num_new += is_new;
    };
    const RowFlow::Instance& owner = flow.instance(e);
    push(owner.rank, owner.rows, false);
    if (owner.next_of_expert < 0) continue;
    replicas.clear();
    for (int32_t i = owner.next_of_expert; i >= 0; i = flow.instance(i).next_of_expert)
      replicas.emplace_back(flow.instance(i).rank, flow.instance(i).rows);
    std::sort(replicas.begin(), replicas.end());
    for (const auto& [rank, rows] : replicas) {
      push(rank, rows, !work.IsResident(e, rank));
      ++out.replicas[rank];
    }
  }
  out.first.push_back(out.size());
  return out;
}

RowFlow ToFlow(const Workload& work, const PlacedRows& placed, const std::vector<int64_t>& rows,
               std::vector<int32_t>& flow_idx) {
  RowFlow flow;
  std::vector<int64_t> demand(work.num_experts);
  std::vector<int32_t> owner(work.num_experts);
  for (int32_t e = 0; e < work.num_experts; ++e) {
    owner[e] = placed.rank[placed.first[e]];
    for (int32_t i = placed.first[e]; i < placed.first[e + 1]; ++i) demand[e] += rows[i];
  }
  flow.Reset(demand, owner, work.num_ranks);
  flow_idx.resize(placed.size());
  for (int32_t e = 0; e < work.num_experts; ++e) {
    flow_idx[placed.first[e]] = e;
    for (int32_t i = placed.first[e] + 1; i < placed.first[e + 1]; ++i) {
      flow_idx[i] = flow.Add(e, placed.rank[i]);
      flow.Move(e, flow_idx[i], rows[i]);
    }
  }
  return flow;
}

void ShareInProportion(const int64_t* weight, int32_t count, int64_t total, int64_t* share) {
  if (count == 1) {
    share[0] = total;
    return;
  }
  unsigned __int128 sum = 0;
  for (int32_t i = 0; i < count; ++i) sum += static_cast<uint64_t>(weight[i]);
  if (sum == 0) {
    std::fill(share, share + count, 0);
    share[0] = total;
    return;
  }
  std::vector<std::pair<uint64_t, int32_t>> remainder(count);
  int64_t left = total;
  for (int32_t i = 0; i < count; ++i) {
    const unsigned __int128 product =
        static_cast<unsigned __int128>(weight[i]) * static_cast<uint64_t>(total);
    share[i] = static_cast<int64_t>(product / sum);
    remainder[i] = {~static_cast<uint64_t>(product % sum), i};  // complemented: the largest sorts first
    left -= share[i];
  }
  if (left == 0) return;
  std::nth_element(remainder.begin(), remainder.begin() + (left - 1), remainder.end());
  for (int64_t i = 0; i < left; ++i) ++share[remainder[i].second];
}

}  // namespace lrmoe::planner
