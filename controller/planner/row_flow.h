// Rows of experts on the instances of a placement, as a flow: experts supply their rows, instances carry
// them, ranks have a capacity. Answers "does this placement fit under this peak" and "what is the least peak"
// exactly, in integers, by augmenting paths; a failed fit names the ranks that are the bottleneck (a minimum
// cut).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace lrmoe::planner {

// What each rank can carry. A level is a load divided by the rank's weight; the weight of the fastest rank is
// 1, so with equal ranks a level is a number of rows.
struct RankCapacity {
  std::vector<double> weight;  // [G] service rate over the fastest rank's, in (0, 1]
  std::vector<int64_t> limit;  // [G] rows the rank can hold at most, whatever the level (memory)
  bool uniform = true;         // every weight is 1

  // Rows of `rank_idx` at `level`: the largest n with n / weight <= level, at most the limit.
  int64_t RowsAt(double level, int32_t rank_idx) const;
  // The least level at which `ranks` carry `rows` together; infinity when their limits forbid it.
  double LeastLevel(int64_t rows, std::span<const int32_t> ranks) const;
};

// Equal rates and no limits for `num_ranks`; or the given rates (> 0).
RankCapacity MakeCapacity(std::span<const double> rows_per_ms);

// Not thread-safe; copyable (a copy is a snapshot).
class RowFlow {
 public:
  struct Instance {
    int32_t expert = 0;
    int32_t rank = 0;
    int64_t rows = 0;
    int32_t next_of_expert = -1;  // owner first, then in the order of insertion
    int32_t next_on_rank = -1;    // only experts with several instances are on a rank's list
    int32_t prev_on_rank = -1;
  };

  // One instance per expert, at its owner, with all of its `demand`. Instance e is expert e's owner instance.
  void Reset(std::span<const int64_t> demand, std::span<const int32_t> owner, int32_t num_ranks);

  // Adds an empty instance; returns its index. The expert has none on that rank yet.
  int32_t Add(int32_t expert_idx, int32_t rank_idx);
  // Removes a replica; its rows go to the owner's instance.
  void Remove(int32_t instance_idx);
  // Moves rows between two instances of one expert.
  void Move(int32_t from, int32_t to, int64_t rows);
  // Changes an expert's demand by adding `rows` (may be negative) to one instance.
  void AddRows(int32_t instance_idx, int64_t rows);

  // Sets the rows each rank may hold from here on.
  void SetLevel(const RankCapacity& capacity, double level);
  void SetRoom(int32_t rank_idx, int64_t rows) { room_[rank_idx] = rows; }
  // Moves rows until no rank exceeds its room, the most overloaded rank first. False when that is impossible:
  // cut() then holds the ranks that are overloaded together; every expert with rows there has all of its
  // instances there.
  bool Fit();
  bool Fit(const RankCapacity& capacity, double level) {
    SetLevel(capacity, level);
    return Fit();
  }
  // Moves as many rows as possible off the ranks above their room; some may stay above.
  void RelieveAll();
  // The least level >= `start` that fits, reached. `start` must be a lower bound or an accepted level.
  // Infinity when the limits do not allow any (rows are then left somewhere in between).
  double MinimisePeak(const RankCapacity& capacity, double start);

  // Takes over instances and rows of `saved`, a flow of the same problem; demands and rooms stay.
  void Restore(const RowFlow& saved);

  std::span<const int32_t> cut() const { return queue_; }
  bool InCut(int32_t rank_idx) const { return seen_rank_[rank_idx] == stamp_; }
  int64_t load(int32_t rank_idx) const { return load_[rank_idx]; }
  int64_t room(int32_t rank_idx) const { return room_[rank_idx]; }
  std::span<const int64_t> loads() const { return load_; }
  int64_t demand(int32_t expert_idx) const { return demand_[expert_idx]; }
  int32_t num_replicas(int32_t rank_idx) const { return num_replicas_[rank_idx]; }
  const Instance& instance(int32_t idx) const { return instances_[idx]; }
  // First instance on a rank of those experts that have several; follow next_on_rank.
  int32_t first_on_rank(int32_t rank_idx) const { return first_on_rank_[rank_idx]; }
  int32_t num_experts() const { return static_cast<int32_t>(demand_.size()); }
  int32_t num_ranks() const { return static_cast<int32_t>(load_.size()); }
  // One past the largest instance index; removed ones have rank -1.
  int32_t end_instance() const { return static_cast<int32_t>(instances_.size()); }
  // Index of the expert's instance on a rank, or -1.
  int32_t Find(int32_t expert_idx, int32_t rank_idx) const;
  // Edges looked at so far: a measure of work that does not depend on the machine.
  int64_t work() const { return work_; }
  void SpendWork(int64_t amount) { work_ += amount; }

 private:
  bool Relieve(int32_t rank_idx);
  void Augment(int32_t source, int32_t target);
  void LinkToRank(int32_t instance_idx);
  void UnlinkFromRank(int32_t instance_idx);

  std::vector<int64_t> demand_;  // [E]
  std::vector<int64_t> load_;    // [G]
  std::vector<int64_t> room_;    // [G] capacity at the level in force
  std::vector<Instance> instances_;
  std::vector<int32_t> first_on_rank_;  // [G]
  std::vector<int32_t> num_replicas_;   // [G]
  std::vector<int32_t> free_;           // indices of removed instances
  // Breadth-first search over ranks; valid where the stamp is current.
  std::vector<int32_t> seen_rank_, seen_expert_;
  std::vector<int32_t> from_, to_;  // [G] instances through which a rank was reached
  std::vector<int32_t> queue_;
  int32_t stamp_ = 0;
  int64_t work_ = 0;
};

}  // namespace lrmoe::planner
