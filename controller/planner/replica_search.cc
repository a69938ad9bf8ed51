#include "controller/planner/replica_search.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "controller/planner/cover_search.h"
#include "controller/planner/deficit_fill.h"
#include "controller/planner/exact_search.h"
#include "controller/planner/owned_experts.h"
#include "controller/planner/placement_bounds.h"
#include "controller/planner/replica_exchange.h"
#include "controller/planner/replica_greedy.h"
#include "controller/planner/replica_locality.h"
#include "controller/planner/replica_thrift.h"
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
        owned_(problem, work),
        bounds_(problem, work, limits, owned_),
        greedy_(work, owned_),
        cover_(work, owned_),
        fill_(work, owned_),
        cells_(int64_t{work.num_experts} * work.num_ranks),
        state_(problem, work, limits),
        best_(state_),
        scratch_(state_),
        exchange_(work, greedy_, scratch_),
        locality_(problem, work, scratch_),
        thrift_(problem, work) {}

  RowFlow Run() {
    goal_ = limits_.target_level;
    if (!std::isinf(bounds_.LeastLevel())) goal_ = std::max(goal_, bounds_.LeastLevel());
    least_new_ = bounds_.LeastNew(goal_);
    floor_level_ = limits_.capacity.LeastLevel(work_.total, work_.all_ranks);
    if (std::isinf(bounds_.LeastLevel())) {  // memory forbids every placement: nothing to search for
      Attempt(true, goal_, Start::kInterleaved, kAnyNumber);
      return best_.state.flow();
    }
    First();
    const bool proven = !Optimal() && cells_ <= kExactCells && Prove();
    if (!best_.reached) Approach(limits_.effort * (cells_ + 500));
    // Within the goal without new replicas is good enough.
    if (best_.reached && best_.num_new > 0) Polish(proven);
    if (best_.num_new > 0) {
      if (best_.reached) locality_.Run(best_.state, goal_, kMostPolish + cells_);
      best_.state.LeastPeak();
      thrift_.Run(best_.state, scratch_);
    }
    return best_.state.flow();
  }

 private:
  static constexpr int64_t kExactCells = 128;
  static constexpr int32_t kExactNodes = 300;
  // Where many are needed, one replica more than suffices, never two, is made if it brings the peak nearer to
  // perfect balance by 1 / kReplicaWorth of the tolerance.
  static constexpr int32_t kMany = 8;
  static constexpr double kReplicaWorth = 8;
  static constexpr int64_t kMostFills = 20;      // tries at filling deficits, while the goal is missed
  static constexpr int64_t kFillSteps = 6000;    // to spend on them, more or less
  static constexpr int32_t kManyRanks = 32;      // beyond them deficits are filled only where needed
  static constexpr int64_t kMostPolish = 12000;  // edges, once the goal is reached
  static constexpr int32_t kAnyNumber = std::numeric_limits<int32_t>::max();

  // How a placement is begun; the flow completes it.
  enum class Start : uint8_t { kInterleaved, kOneByOne, kWholeDeficits };

  struct Best {
    explicit Best(const SearchState& s) : state(s) {}
    SearchState state;
    double level = kInfinity;
    bool reached = false;
    int32_t num_new = 0;
    int32_t fan_out = 0;
  };

  void First() {
    for (const bool with_residents : {true, false}) {
      if (!with_residents && !work_.any_resident) continue;
      for (const Start start : {Start::kInterleaved, Start::kOneByOne}) {
        Attempt(with_residents, goal_, start, kAnyNumber);
        if (Optimal()) return;
      }
      if (!best_.reached || work_.num_ranks <= kManyRanks)
        Attempt(with_residents, goal_, Start::kWholeDeficits, kAnyNumber);
      if (Optimal()) return;
    }
    if (!best_.reached) Try(true, ReceiverRule::kBestFit);
    if (!best_.reached) Try(true, ReceiverRule::kLargest);
  }

  // Small cases: the fewest new replicas, or that the goal is out of reach. False when that took too long.
  bool Prove() {
    ExactSearch exact(problem_, work_, limits_, greedy_);
    const int32_t bound = best_.reached ? best_.num_new : work_.num_experts * work_.num_ranks;
    if (exact.Run(state_, least_new_, bound, kExactNodes)) Consider(true);
    return exact.complete();
  }

  // Covers the overloaded ranks at `level`, then adds what the flow still misses.
  bool Attempt(bool with_residents, double level, Start start, int32_t bound) {
    state_.Start(with_residents);
    state_.SetTarget(level);
    if (with_residents && work_.any_resident && !state_.Fit()) {
      state_.flow().RelieveAll();
      state_.DropIdle();
    }
    const std::vector<CoverSearch::Copy>& copies =
        start == Start::kWholeDeficits
            ? fill_.Run(state_, NumFills())
            : cover_.Run(state_,
                         start == Start::kInterleaved ? SenderOrder::kInterleaved : SenderOrder::kOneByOne,
                         least_new_, cells_ + 500);
    for (const CoverSearch::Copy& copy : copies)
      if (state_.HasSlot(copy.rank)) state_.Add(copy.expert, copy.rank);
    state_.flow().SpendWork(start == Start::kWholeDeficits ? fill_.spent() : cover_.spent());
    return Consider(greedy_.Complete(state_, ReceiverRule::kBestFit, bound, nullptr));
  }

  // A fill looks at every rank and at a rank's experts for every replica.
  int64_t NumFills() const {
    if (best_.reached || !approaching_) return 1;
    int64_t slots = 0;
    for (const RankResources& rank : problem_.cluster.ranks) slots += rank.replica_slots;
    const int64_t steps = slots * (work_.num_ranks + work_.num_experts / work_.num_ranks);
    return std::clamp<int64_t>(kFillSteps / std::max<int64_t>(steps, 1), 1, kMostFills);
  }

  void Try(bool with_residents, ReceiverRule rule) {
    state_.Start(with_residents);
    state_.SetTarget(goal_);
    if (with_residents && !state_.Fit()) state_.DropIdle();
    Consider(greedy_.Complete(state_, rule, kAnyNumber, nullptr));
  }

  // Lowers the peak towards the goal that was missed.
  void Approach(int64_t budget) {
    approaching_ = true;
    double low = goal_;
    for (int round = 0; round < 3; ++round) {
      const double level = low + (best_.level - low) / 2, before = best_.level;
      if (!(level < before)) break;
      for (const Start start : {Start::kWholeDeficits, Start::kInterleaved})
        if (best_.level >= before) Attempt(true, level, start, kAnyNumber);
      if (best_.level >= before && work_.any_resident)
        Attempt(false, level, Start::kWholeDeficits, kAnyNumber);
      if (best_.level >= before) low = level;
    }
    double level = goal_;
    for (int round = 0; round < 3 && !best_.reached; ++round) {
      state_.Restore(best_.state);
      state_.SetTarget(level);
      Consider(exchange_.Run(state_, kAnyNumber, budget / 3));
      level = goal_ + (best_.level - goal_) * 0.5;
    }
  }

  // Fewer new replicas, then a lower peak with as many or, if they are many, one more.
  void Polish(bool fewest_proven) {
    const int64_t budget = std::min(limits_.effort * (cells_ + 500), kMostPolish);
    polish_until_ = state_.flow().work() + kMostPolish + cells_;
    if (!fewest_proven) Reduce(budget / 2);
    fewest_ = best_.num_new;
    Tighten(fewest_, budget / 4);
    if (MostNew() > fewest_ && Beyond(best_.level) > 1 / kReplicaWorth) Tighten(fewest_ + 1, budget / 2);
  }

  // Tries to do with fewer new replicas, one at a time.
  void Reduce(int64_t budget) {
    while (!Optimal() && state_.flow().work() < polish_until_) {
      const int32_t before = best_.num_new;
      state_.Restore(best_.state);
      state_.SetTarget(goal_);
      int32_t least = -1;
      for (int32_t i = work_.num_experts; i < state_.flow().end_instance(); ++i)
        if (state_.IsNew(i) &&
            (least < 0 || state_.flow().instance(i).rows < state_.flow().instance(least).rows))
          least = i;
      if (least < 0) return;
      state_.Remove(least);
      const int64_t start = state_.flow().work();
      if (!exchange_.Run(state_, before - 1, budget) || !Consider(true)) return;
      budget -= state_.flow().work() - start;
    }
  }

  // Lowers the peak further with at most `max_new` new replicas.
  void Tighten(int32_t max_new, int64_t budget) {
    double low = floor_level_;
    for (int round = 0; round < 3 && Beyond(best_.level) - Beyond(low) >= 0.05; ++round) {
      if (state_.flow().work() >= polish_until_) return;
      const double level = low + (best_.level - low) * (round == 0 ? 0.25 : 0.5);
      if (bounds_.LeastNew(level) > max_new) {
        low = level;
        continue;
      }
      const double before = best_.level;
      for (const Start start : {Start::kInterleaved, Start::kWholeDeficits})
        if (best_.level >= before) Attempt(true, level, start, max_new);
      if (best_.level >= before) {
        state_.Restore(best_.state);
        state_.SetTarget(level);
        Consider(exchange_.Run(state_, max_new, budget / 3));
      }
      if (best_.level >= before) low = level;
    }
  }

  // How much of the tolerance a peak uses: 0 at the least level, 1 at the goal.
  double Beyond(double level) const {
    return goal_ > floor_level_ ? (level - floor_level_) / (goal_ - floor_level_) : 0;
  }

  // Takes the state if it is better than the best: peak within the goal or lower, fewer new replicas (once
  // it is known how many suffice, perhaps one more for a lower peak), a smaller fan-out, a lower peak.
  // `fits`: it fits its own target.
  bool Consider(bool fits) {
    const double best_goal = std::max(best_.level, goal_);
    const double goal = fits ? std::max(state_.target(), goal_) : std::max(state_.LeastPeak(), goal_);
    if (goal > best_goal) return false;
    if (state_.num_new() > least_new_ && state_.num_new() > 0)
      state_.Prune(fits ? state_.target() : goal, scratch_);
    if (goal == best_goal && !std::isinf(best_.level) && state_.num_new() > MostNew()) return false;
    const double level = state_.LeastPeak();
    state_.DropIdle();
    const int32_t fan_out = FanOut();
    if (!std::isinf(best_.level) && !IsBetter(level, fan_out)) return false;
    best_.state.Restore(state_);
    best_.level = level;
    best_.reached = level <= goal_;
    best_.num_new = state_.num_new();
    best_.fan_out = fan_out;
    return true;
  }

  bool IsBetter(double level, int32_t fan_out) const {
    const double goal = std::max(level, goal_), best_goal = std::max(best_.level, goal_);
    if (goal != best_goal) return goal < best_goal;
    if (fewest_ == kAnyNumber && state_.num_new() != best_.num_new) return state_.num_new() < best_.num_new;
    const double cost = state_.num_new() + kReplicaWorth * std::min(1.0, Beyond(level));
    const double best_cost = best_.num_new + kReplicaWorth * std::min(1.0, Beyond(best_.level));
    if (std::abs(cost - best_cost) > 0.2) return cost < best_cost;
    if (fan_out != best_.fan_out) return fan_out < best_.fan_out;
    return cost < best_cost;
  }

  // New replicas that a better placement may have.
  int32_t MostNew() const { return fewest_ == kAnyNumber ? best_.num_new : fewest_ + (fewest_ >= kMany); }

  int32_t FanOut() {
    sent_.assign(work_.num_ranks, 0);
    int32_t most = 0;
    for (int32_t i = work_.num_experts; i < state_.flow().end_instance(); ++i)
      if (state_.IsNew(i)) most = std::max(most, ++sent_[problem_.owner[state_.flow().instance(i).expert]]);
    return most;
  }

  bool Optimal() const { return best_.reached && best_.num_new <= least_new_; }

  const PlanningProblem& problem_;
  const Workload& work_;
  const SearchLimits& limits_;
  const OwnedExperts owned_;
  const PlacementBounds bounds_;
  ReplicaGreedy greedy_;
  CoverSearch cover_;
  DeficitFill fill_;
  const int64_t cells_;
  SearchState state_;
  Best best_;
  SearchState scratch_;
  ReplicaExchange exchange_;
  ReplicaLocality locality_;
  const ReplicaThrift thrift_;
  double goal_ = 0;              // the target level, or the least that any placement allows
  double floor_level_ = 0;       // perfect balance
  int32_t least_new_ = 0;        // no placement within the goal has fewer new replicas
  int32_t fewest_ = kAnyNumber;  // new replicas that suffice, once known
  bool approaching_ = false;
  int64_t polish_until_ = 0;  // work of state_'s flow at which improving on a reached goal ends
  std::vector<int32_t> sent_;
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
