#include "controller/planner/replica_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "controller/planner/exact_search.h"
#include "controller/planner/replica_greedy.h"
#include "controller/planner/search_state.h"

namespace lrmoe::planner {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

class Search {
 public:
  Search(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits)
      : problem_(problem),
        work_(work),
        limits_(limits),
        greedy_(problem, work),
        state_(problem, work, limits),
        best_(state_),
        scratch_(state_) {}

  RowFlow Run() {
    // Work allowed for improving on the greedy plans; grows with the problem so that planning time does, too.
    const int64_t cells = int64_t{work_.num_experts} * work_.num_ranks;
    const int64_t budget = limits_.effort * (cells + 500);
    Try(true, ReceiverRule::kBestFit);
    if (Optimal()) return Take();
    Try(true, ReceiverRule::kLargest);
    if (work_.any_resident) {
      Try(false, ReceiverRule::kBestFit);
      Try(false, ReceiverRule::kLargest);
    }
    if (Optimal()) return Take();
    if (cells <= kExactCells) {
      ExactSearch exact(problem_, work_, limits_, greedy_);
      const int32_t bound = best_.reached ? best_.num_new : work_.num_experts * work_.num_ranks;
      if (exact.Run(state_, least_new_, bound, kExactNodes)) Consider(true);
      if (exact.complete() && best_.reached) return Take();
    }
    Improve(budget);
    return Take();
  }

 private:
  static constexpr int64_t kExactCells = 128;
  static constexpr int32_t kExactNodes = 4000;

  struct Best {
    explicit Best(const SearchState& s) : state(s) {}
    SearchState state;
    double level = kInfinity;
    bool reached = false;
    int32_t num_new = 0;
    int32_t fan_out = 0;
  };

  void Try(bool with_residents, ReceiverRule rule) {
    state_.Start(with_residents);
    if (with_residents && !state_.Fit()) state_.DropIdle();
    Consider(greedy_.Complete(state_, rule, std::numeric_limits<int32_t>::max(), nullptr));
  }

  // Takes the state if it is better than the best: peak within the target or lower, fewer new replicas, then
  // a noticeably lower peak, a smaller fan-out, a lower peak. `fits`: it fits its own target.
  bool Consider(bool fits) {
    const double best_goal = std::max(best_.level, limits_.target_level);
    double goal = fits ? state_.target() : std::max(state_.LeastPeak(), limits_.target_level);
    if (goal > best_goal) return false;
    state_.Prune(goal, scratch_);
    if (goal == best_goal && state_.num_new() > best_.num_new && !std::isinf(best_.level)) return false;
    const double level = state_.LeastPeak();
    state_.DropIdle();
    const int32_t fan_out = FanOut();
    if (!std::isinf(best_.level) && !IsBetter(level, fan_out)) return false;
    best_.state.Restore(state_);
    best_.level = level;
    best_.reached = level <= limits_.target_level;
    best_.num_new = state_.num_new();
    best_.fan_out = fan_out;
    if (least_new_ < 0) least_new_ = LeastNew();
    return true;
  }

  bool IsBetter(double level, int32_t fan_out) const {
    const double goal = std::max(level, limits_.target_level),
                 best_goal = std::max(best_.level, limits_.target_level);
    if (goal != best_goal) return goal < best_goal;
    if (state_.num_new() != best_.num_new) return state_.num_new() < best_.num_new;
    const double step = 0.002 * static_cast<double>(work_.total) / work_.total_weight;
    if (std::abs(level - best_.level) > step) return level < best_.level;
    if (fan_out != best_.fan_out) return fan_out < best_.fan_out;
    return level < best_.level;
  }

  int32_t FanOut() {
    sent_.assign(work_.num_ranks, 0);
    int32_t most = 0;
    for (int32_t i = work_.num_experts; i < state_.flow().end_instance(); ++i)
      if (state_.IsNew(i)) most = std::max(most, ++sent_[problem_.owner[state_.flow().instance(i).expert]]);
    return most;
  }

  bool Optimal() const { return best_.reached && best_.num_new <= std::max(least_new_, 0); }

  // No placement within the target has fewer new replicas. What overloaded owners hold above the target has
  // to find room on ranks that hold a replica; every overloaded owner has to send something.
  int32_t LeastNew() const {
    int64_t overflow = 0;
    int32_t senders = 0;
    std::vector<int64_t> owned(work_.num_ranks, 0);
    for (int32_t e = 0; e < work_.num_experts; ++e) owned[problem_.owner[e]] += work_.rows[e];
    std::vector<bool> sends(work_.num_ranks, false);
    for (int32_t g = 0; g < static_cast<int32_t>(problem_.resident.size()); ++g)
      for (int32_t e : problem_.resident[g]) sends[problem_.owner[e]] = true;
    std::vector<int64_t> rooms;
    for (int32_t g = 0; g < work_.num_ranks; ++g) {
      const int64_t room = limits_.capacity.RowsAt(limits_.target_level, g) - owned[g];
      if (room < 0) {
        overflow -= room;
        senders += !sends[g];
      } else if (g < static_cast<int32_t>(problem_.resident.size()) && !problem_.resident[g].empty()) {
        overflow -= room;  // may be used for nothing
      } else if (problem_.cluster.ranks[g].replica_slots > 0) {
        rooms.push_back(room);
      }
    }
    std::sort(rooms.rbegin(), rooms.rend());
    int32_t receivers = 0;
    for (size_t i = 0; i < rooms.size() && overflow > 0; ++i, ++receivers) overflow -= rooms[i];
    return std::max(senders, receivers);
  }

  // Ruin and recreate: takes some replicas out of the best placement and completes it anew, with seeded
  // variety.
  void Improve(int64_t budget) {
    Random random(0x1d8af066);
    const int64_t start = state_.flow().work();
    while (state_.flow().work() - start < budget && !Optimal()) {
      const double floor_level = limits_.capacity.LeastLevel(work_.total, work_.all_ranks);
      if (!best_.reached && best_.level <= floor_level) break;
      state_.Restore(best_.state);
      state_.flow().SpendWork(state_.flow().end_instance() + work_.num_ranks);
      // Where the target was missed, work towards a peak between it and the best.
      const double goal = best_.reached ? limits_.target_level
                                        : limits_.target_level +
                                              (best_.level - limits_.target_level) * random.Uniform() * 0.98;
      state_.SetTarget(goal);
      Ruin(random);
      const int32_t bound = best_.reached ? best_.num_new : std::numeric_limits<int32_t>::max();
      if (greedy_.Complete(state_, ReceiverRule::kRandom, bound, &random)) Consider(true);
    }
  }

  void Ruin(Random& random) {
    RowFlow& flow = state_.flow();
    replicas_.clear();
    for (int32_t i = work_.num_experts; i < flow.end_instance(); ++i)
      if (flow.instance(i).rank >= 0) replicas_.push_back(i);
    if (replicas_.empty()) return;
    const size_t count = std::min<size_t>(replicas_.size(), 1 + random.Below(4));
    // Half of the time replicas of one owner's experts, which compete for the same receivers.
    const int32_t owner = problem_.owner[flow.instance(replicas_[random.Below(replicas_.size())]).expert];
    const bool related = random.Below(2) == 0;
    size_t removed = 0;
    for (size_t tries = 0; tries < 4 * count && removed < count && !replicas_.empty(); ++tries) {
      const size_t at = random.Below(replicas_.size());
      const int32_t idx = replicas_[at];
      if (related && problem_.owner[flow.instance(idx).expert] != owner) continue;
      state_.Remove(idx);
      replicas_.erase(replicas_.begin() + static_cast<int64_t>(at));
      ++removed;
    }
  }

  RowFlow Take() { return best_.state.flow(); }

  const PlanningProblem& problem_;
  const Workload& work_;
  const SearchLimits& limits_;
  ReplicaGreedy greedy_;
  SearchState state_;
  Best best_;
  SearchState scratch_;
  int32_t least_new_ = -1;
  std::vector<int32_t> replicas_, sent_;
};

}  // namespace

RowFlow SearchReplicas(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits) {
  return Search(problem, work, limits).Run();
}

RowFlow KeepReplicas(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits,
                     bool residents) {
  SearchState state(problem, work, limits);
  state.Start(residents);
  state.LeastPeak();
  state.DropIdle();
  return state.flow();
}

}  // namespace lrmoe::planner
