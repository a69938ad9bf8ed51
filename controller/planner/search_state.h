// A placement being searched: instances, rows, and what memory leaves once replicas are held.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/planner/problem.h"
#include "controller/planner/replica_search.h"
#include "controller/planner/row_flow.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

// Not thread-safe. Restore() makes a state equal to another of the same search.
class SearchState {
 public:
  SearchState(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits);

  // Owners only, or with every resident that has rows to serve.
  void Start(bool with_residents);
  void Restore(const SearchState& saved);

  void Add(int32_t expert_idx, int32_t rank_idx);
  void Remove(int32_t instance_idx);
  // Removes replicas without rows: they would cost memory and a gradient sum for nothing.
  void DropIdle();
  // Tries to do without each new replica, the least used first, keeping the peak at or under `level`.
  // `scratch` is any state of the same search; its contents are lost.
  void Prune(double level, SearchState& scratch);

  // The level Fit() works towards.
  void SetTarget(double level);
  double target() const { return target_; }
  bool Fit() { return flow_.Fit(); }
  // Brings the peak to the least level the instances allow and returns it. Where memory limits forbid any
  // allocation, it is infinite and the rows are those of the least peak without limits.
  double LeastPeak();

  int32_t FreeSlots(int32_t rank_idx) const { return slots_[rank_idx] - flow_.num_replicas(rank_idx); }
  bool HasSlot(int32_t rank_idx) const { return FreeSlots(rank_idx) > 0; }
  bool IsNew(int32_t instance_idx) const {
    const RowFlow::Instance& instance = flow_.instance(instance_idx);
    return instance_idx >= work_.num_experts && instance.rank >= 0 &&
           !work_.IsResident(instance.expert, instance.rank);
  }
  int32_t num_new() const { return num_new_; }
  // Rows a rank can still take at the target, after paying for one more replica if `with_replica`.
  int64_t Room(int32_t rank_idx, bool with_replica) const;
  bool Confined(int32_t expert_idx) const;  // every instance lies in the cut of the last failed Fit
  int64_t CutExcess() const;                // rows the cut holds above its room
  int64_t Excess() const;                   // rows that all ranks together hold above their room

  RowFlow& flow() { return flow_; }
  const RowFlow& flow() const { return flow_; }
  const Workload& work() const { return work_; }

 private:
  void UpdateLimit(int32_t rank_idx);

  const PlanningProblem& problem_;
  const Workload& work_;
  const SearchLimits& limits_;
  std::vector<int32_t> slots_;
  RankCapacity capacity_;  // limits follow the replicas held
  RowFlow flow_;
  double target_ = 0;
  int32_t num_new_ = 0;
};

}  // namespace lrmoe::planner
