#include "controller/planner/search_state.h"

#include <algorithm>
#include <cmath>

namespace lrmoe::planner {

namespace {
constexpr int kMostFailures = 12;  // to remove a replica; larger ones hardly fare better
}  // namespace

SearchState::SearchState(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits)
    : problem_(problem), work_(work), limits_(limits), capacity_(limits.capacity) {
  for (const RankResources& rank : problem.cluster.ranks) slots_.push_back(rank.replica_slots);
  Start(false);  // a state other states can be restored into
}

void SearchState::Start(bool with_residents) {
  flow_.Reset(work_.rows, problem_.owner, work_.num_ranks);
  capacity_.limit = limits_.capacity.limit;
  num_new_ = 0;
  SetTarget(limits_.target_level);
  if (!with_residents) return;
  for (int32_t g = 0; g < static_cast<int32_t>(problem_.resident.size()); ++g)
    for (int32_t e : problem_.resident[g])
      if (work_.rows[e] > 0) Add(e, g);
}

void SearchState::Restore(const SearchState& saved) {
  flow_.Restore(saved.flow_);
  num_new_ = saved.num_new_;
  if (!limits_.replica_rows.empty()) {
    capacity_.limit = saved.capacity_.limit;
  } else if (target_ == saved.target_) {
    return;  // the rooms are the same
  }
  SetTarget(saved.target_);
}

void SearchState::UpdateLimit(int32_t g) {
  if (limits_.replica_rows.empty()) return;
  capacity_.limit[g] =
      std::max<int64_t>(0, limits_.capacity.limit[g] - limits_.replica_rows[g] * flow_.num_replicas(g));
  flow_.SetRoom(g, capacity_.RowsAt(target_, g));
}

void SearchState::Add(int32_t e, int32_t g) {
  flow_.Add(e, g);
  num_new_ += !work_.IsResident(e, g);
  UpdateLimit(g);
}

void SearchState::Remove(int32_t idx) {
  const int32_t g = flow_.instance(idx).rank;
  num_new_ -= IsNew(idx);
  flow_.Remove(idx);
  UpdateLimit(g);
}

void SearchState::DropIdle() {
  for (int32_t i = work_.num_experts; i < flow_.end_instance(); ++i)
    if (flow_.instance(i).rank >= 0 && flow_.instance(i).rows == 0) Remove(i);
}

void SearchState::SetTarget(double level) {
  target_ = level;
  flow_.SetLevel(capacity_, level);
}

double SearchState::LeastPeak() {
  const double level = flow_.MinimisePeak(capacity_, capacity_.LeastLevel(work_.total, work_.all_ranks));
  if (std::isinf(level))
    flow_.MinimisePeak(work_.capacity, work_.capacity.LeastLevel(work_.total, work_.all_ranks));
  flow_.SetLevel(capacity_, target_);
  return level;
}

void SearchState::Prune(double level, SearchState& scratch) {
  if (std::isinf(level) || num_new_ == 0) return;
  const double target = target_;
  SetTarget(level);
  std::vector<std::pair<int64_t, int32_t>> candidates;
  for (int32_t i = work_.num_experts; i < flow_.end_instance(); ++i)
    if (IsNew(i)) candidates.emplace_back(flow_.instance(i).rows, i);
  std::sort(candidates.begin(), candidates.end());
  int64_t free = 0;  // never more while replicas only go
  for (int32_t g = 0; g < work_.num_ranks; ++g) free += std::max<int64_t>(0, flow_.room(g) - flow_.load(g));
  scratch.Restore(*this);
  int failures = 0;
  for (const auto& [rows, i] : candidates) {
    if (rows > free || failures == kMostFailures) break;
    Remove(i);
    if (Fit()) {
      scratch.Restore(*this);
    } else {
      Restore(scratch);
      ++failures;
    }
  }
  DropIdle();
  SetTarget(target);
}

int64_t SearchState::Room(int32_t g, bool with_replica) const {
  int64_t room = flow_.room(g);
  if (with_replica && !limits_.replica_rows.empty())
    room = std::min(room, capacity_.limit[g] - limits_.replica_rows[g]);
  return room - flow_.load(g);
}

bool SearchState::Confined(int32_t e) const {
  for (int32_t i = e; i >= 0; i = flow_.instance(i).next_of_expert)
    if (!flow_.InCut(flow_.instance(i).rank)) return false;
  return true;
}

int64_t SearchState::Excess() const {
  int64_t excess = 0;
  for (int32_t g = 0; g < work_.num_ranks; ++g) excess += std::max<int64_t>(0, flow_.load(g) - flow_.room(g));
  return excess;
}

int64_t SearchState::CutExcess() const {
  int64_t excess = 0;
  for (int32_t g : flow_.cut()) excess += flow_.load(g) - flow_.room(g);
  return excess;
}

}  // namespace lrmoe::planner
