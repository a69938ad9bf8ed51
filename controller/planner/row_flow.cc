#include "controller/planner/row_flow.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/check.h"

namespace lrmoe::planner {

namespace {
constexpr double kInfinity = std::numeric_limits<double>::infinity();
}  // namespace

RankCapacity MakeCapacity(std::span<const double> rows_per_ms) {
  RankCapacity out;
  const double fastest =
      rows_per_ms.empty() ? 1.0 : *std::max_element(rows_per_ms.begin(), rows_per_ms.end());
  for (double rate : rows_per_ms) {
    out.weight.push_back(rate / fastest);
    out.uniform = out.uniform && rate == fastest;
  }
  out.limit.assign(rows_per_ms.size(), std::numeric_limits<int64_t>::max());
  return out;
}

int64_t RankCapacity::RowsAt(double level, int32_t rank_idx) const {
  if (!(level < 0x1p61)) return limit[rank_idx];
  int64_t rows = static_cast<int64_t>(level * weight[rank_idx]);
  if (!uniform) {  // the division below decides, so that every caller agrees to the last row
    while (static_cast<double>(rows) / weight[rank_idx] > level) --rows;
    while (static_cast<double>(rows + 1) / weight[rank_idx] <= level) ++rows;
  }
  return std::min(rows, limit[rank_idx]);
}

double RankCapacity::LeastLevel(int64_t rows, std::span<const int32_t> ranks) const {
  double weights = 0;
  unsigned __int128 limits = 0;
  for (int32_t g : ranks)
    weights += weight[g], limits += static_cast<uint64_t>(std::max<int64_t>(limit[g], 0));
  if (limits < static_cast<unsigned __int128>(rows)) return kInfinity;
  // A real-valued lower bound, then up in whole rows. Ranks at their limit do not rise: restart the bound
  // without them.
  const auto num_ranks = static_cast<int64_t>(ranks.size());
  const int64_t even = (rows + num_ranks - 1) / num_ranks;
  double level = uniform ? static_cast<double>(even) : static_cast<double>(rows) / weights * (1.0 - 1e-15);
  for (;;) {
    int64_t carried = 0;
    double rising = 0, next = kInfinity;
    for (int32_t g : ranks) {
      const int64_t here = RowsAt(level, g);
      carried += here;
      if (here == limit[g]) continue;
      rising += weight[g];
      next = std::min(next, static_cast<double>(here + 1) / weight[g]);
    }
    if (carried >= rows) return level;
    const double jump = level + static_cast<double>(rows - carried) / rising * (1.0 - 1e-15) -
                        static_cast<double>(ranks.size()) / rising;
    level = std::max(next, std::floor(jump));
  }
}

void RowFlow::Reset(std::span<const int64_t> demand, std::span<const int32_t> owner, int32_t num_ranks) {
  demand_.assign(demand.begin(), demand.end());
  load_.assign(num_ranks, 0);
  room_.assign(num_ranks, 0);
  first_on_rank_.assign(num_ranks, -1);
  num_replicas_.assign(num_ranks, 0);
  free_.clear();
  queue_.clear();
  seen_rank_.assign(num_ranks, 0);
  seen_expert_.assign(demand.size(), 0);
  from_.resize(num_ranks);
  to_.resize(num_ranks);
  stamp_ = 0;
  instances_.resize(demand.size());
  for (size_t e = 0; e < demand.size(); ++e) {
    instances_[e] = {static_cast<int32_t>(e), owner[e], demand[e], -1, -1, -1};
    load_[owner[e]] += demand[e];
  }
}

void RowFlow::LinkToRank(int32_t idx) {
  Instance& self = instances_[idx];
  self.prev_on_rank = -1;
  self.next_on_rank = first_on_rank_[self.rank];
  if (self.next_on_rank >= 0) instances_[self.next_on_rank].prev_on_rank = idx;
  first_on_rank_[self.rank] = idx;
}

void RowFlow::UnlinkFromRank(int32_t idx) {
  const Instance& self = instances_[idx];
  if (self.next_on_rank >= 0) instances_[self.next_on_rank].prev_on_rank = self.prev_on_rank;
  if (self.prev_on_rank >= 0) {
    instances_[self.prev_on_rank].next_on_rank = self.next_on_rank;
  } else {
    first_on_rank_[self.rank] = self.next_on_rank;
  }
}

int32_t RowFlow::Add(int32_t expert_idx, int32_t rank_idx) {
  int32_t idx;
  if (free_.empty()) {
    idx = static_cast<int32_t>(instances_.size());
    instances_.emplace_back();
  } else {
    idx = free_.back();
    free_.pop_back();
  }
  instances_[idx] = {expert_idx, rank_idx, 0, -1, -1, -1};
  if (instances_[expert_idx].next_of_expert < 0) LinkToRank(expert_idx);
  int32_t last = expert_idx;
  while (instances_[last].next_of_expert >= 0) last = instances_[last].next_of_expert;
  instances_[last].next_of_expert = idx;
  LinkToRank(idx);
  ++num_replicas_[rank_idx];
  return idx;
}

void RowFlow::Remove(int32_t idx) {
  Instance& self = instances_[idx];
  const int32_t owner_instance = self.expert;
  Move(idx, owner_instance, self.rows);
  int32_t before = owner_instance;
  while (instances_[before].next_of_expert != idx) before = instances_[before].next_of_expert;
  instances_[before].next_of_expert = self.next_of_expert;
  UnlinkFromRank(idx);
  if (instances_[owner_instance].next_of_expert < 0) UnlinkFromRank(owner_instance);
  --num_replicas_[self.rank];
  self.rank = -1;
  free_.push_back(idx);
}

void RowFlow::Move(int32_t from, int32_t to, int64_t rows) {
  instances_[from].rows -= rows;
  instances_[to].rows += rows;
  load_[instances_[from].rank] -= rows;
  load_[instances_[to].rank] += rows;
}

void RowFlow::AddRows(int32_t idx, int64_t rows) {
  Instance& self = instances_[idx];
  self.rows += rows;
  load_[self.rank] += rows;
  demand_[self.expert] += rows;
}

int32_t RowFlow::Find(int32_t expert_idx, int32_t rank_idx) const {
  for (int32_t i = expert_idx; i >= 0; i = instances_[i].next_of_expert)
    if (instances_[i].rank == rank_idx) return i;
  return -1;
}

void RowFlow::SetLevel(const RankCapacity& capacity, double level) {
  for (int32_t g = 0; g < num_ranks(); ++g) room_[g] = capacity.RowsAt(level, g);
  work_ += num_ranks();
}

void RowFlow::Augment(int32_t source, int32_t target) {
  int64_t amount = std::min(load_[source] - room_[source], room_[target] - load_[target]);
  for (int32_t g = target; g != source; g = instances_[from_[g]].rank)
    amount = std::min(amount, instances_[from_[g]].rows);
  for (int32_t g = target; g != source;) {
    const int32_t from = from_[g], to = to_[g];
    g = instances_[from].rank;
    Move(from, to, amount);
  }
}

// Brings one rank down to its capacity; false leaves the ranks it can reach in queue_.
bool RowFlow::Relieve(int32_t source) {
  while (load_[source] > room_[source]) {
    ++stamp_;
    queue_.clear();
    queue_.push_back(source);
    seen_rank_[source] = stamp_;
    int32_t target = -1;
    for (size_t head = 0; head < queue_.size() && target < 0; ++head) {
      for (int32_t i = first_on_rank_[queue_[head]]; i >= 0 && target < 0; i = instances_[i].next_on_rank) {
        const Instance& here = instances_[i];
        if (here.rows == 0 || seen_expert_[here.expert] == stamp_) continue;
        seen_expert_[here.expert] = stamp_;
        for (int32_t j = here.expert; j >= 0; j = instances_[j].next_of_expert) {
          ++work_;
          const int32_t rank = instances_[j].rank;
          if (seen_rank_[rank] == stamp_) continue;
          seen_rank_[rank] = stamp_;
          from_[rank] = i;
          to_[rank] = j;
          queue_.push_back(rank);
          if (load_[rank] < room_[rank]) {
            target = rank;
            break;
          }
        }
      }
    }
    if (target < 0) return false;
    Augment(source, target);
  }
  return true;
}

bool RowFlow::Fit() {
  for (;;) {
    int32_t worst = -1;
    int64_t excess = 0;
    for (int32_t g = 0; g < num_ranks(); ++g)
      if (load_[g] - room_[g] > excess) worst = g, excess = load_[g] - room_[g];
    work_ += num_ranks();
    if (worst < 0) return true;
    if (!Relieve(worst)) return false;
  }
}

void RowFlow::RelieveAll() {
  for (int32_t g = 0; g < num_ranks(); ++g) Relieve(g);
}

void RowFlow::Restore(const RowFlow& saved) {
  load_ = saved.load_;
  instances_ = saved.instances_;
  first_on_rank_ = saved.first_on_rank_;
  num_replicas_ = saved.num_replicas_;
  free_ = saved.free_;
}

double RowFlow::MinimisePeak(const RankCapacity& capacity, double start) {
  double level = start;
  if (level == kInfinity) return level;
  while (!Fit(capacity, level)) {
    // The rows on the cut cannot leave it: no level below the one that carries them there is possible.
    int64_t rows = 0;
    for (int32_t g : queue_) rows += load_[g];
    const double least = capacity.LeastLevel(rows, queue_);
    LRMOE_CHECK_GT(least, level);
    if (least == kInfinity) return least;
    level = least;
  }
  return level;
}

}  // namespace lrmoe::planner
