#include "controller/planner/replica_search.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace lrmoe::planner {
namespace {

struct Outcome {
  RowFlow flow;
  double level = std::numeric_limits<double>::infinity();
  int32_t num_new = 0;
};

class Searcher {
 public:
  Searcher(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits)
      : problem_(problem), work_(work), limits_(limits) {}

  Outcome Run(bool with_residents, bool best_fit) {
    flow_.Reset(work_.rows, problem_.owner, work_.num_ranks);
    capacity_ = limits_.capacity;
    if (with_residents) AddResidents();
    bool fits = flow_.Fit(capacity_, limits_.target_level);
    if (!fits && with_residents) {
      DropIdle();
      fits = flow_.Fit(capacity_, limits_.target_level);
    }
    while (!fits && AddReplica(best_fit)) fits = flow_.Fit(capacity_, limits_.target_level);
    Outcome out;
    out.level = FinalLevel();
    Prune(out.level);
    out.level = FinalLevel();
    out.num_new = NumNew();
    out.flow = flow_;
    return out;
  }

  Outcome Keep(bool residents) {
    flow_.Reset(work_.rows, problem_.owner, work_.num_ranks);
    capacity_ = limits_.capacity;
    if (residents) AddResidents();
    Outcome out;
    out.level = FinalLevel();
    DropIdle();
    out.flow = flow_;
    return out;
  }

 private:
  int32_t Add(int32_t e, int32_t g) {
    if (!limits_.replica_rows.empty())
      capacity_.limit[g] = std::max<int64_t>(0, capacity_.limit[g] - limits_.replica_rows[g]);
    return flow_.Add(e, g);
  }
  void Remove(int32_t idx) {
    const int32_t g = flow_.instance(idx).rank;
    flow_.Remove(idx);
    if (limits_.replica_rows.empty()) return;
    capacity_.limit[g] =
        std::max<int64_t>(0, limits_.capacity.limit[g] - limits_.replica_rows[g] * flow_.num_replicas(g));
  }

  void AddResidents() {
    for (int32_t g = 0; g < static_cast<int32_t>(problem_.resident.size()); ++g)
      for (int32_t e : problem_.resident[g])
        if (work_.rows[e] > 0) Add(e, g);
  }

  // Removes replicas without rows: they would cost memory and a gradient sum for nothing.
  void DropIdle() {
    for (int32_t i = work_.num_experts; i < flow_.end_instance(); ++i)
      if (flow_.instance(i).rank >= 0 && flow_.instance(i).rows == 0) Remove(i);
  }

  // The least peak of the instances there are, without memory limits where they forbid any allocation.
  double FinalLevel() {
    const double start = capacity_.LeastLevel(work_.total, work_.all_ranks);
    const double level = flow_.MinimisePeak(capacity_, start);
    if (!std::isinf(level)) return level;
    flow_.MinimisePeak(work_.capacity, work_.capacity.LeastLevel(work_.total, work_.all_ranks));
    return level;
  }

  int32_t NumNew() const {
    int32_t out = 0;
    for (int32_t i = work_.num_experts; i < flow_.end_instance(); ++i)
      out +=
          flow_.instance(i).rank >= 0 && !work_.IsResident(flow_.instance(i).expert, flow_.instance(i).rank);
    return out;
  }

  // Tries to do without each new replica, the least used first.
  void Prune(double level) {
    const double target = std::max(level, limits_.target_level);
    if (std::isinf(target)) return;
    std::vector<std::pair<int64_t, int32_t>> candidates;
    for (int32_t i = work_.num_experts; i < flow_.end_instance(); ++i) {
      const auto& instance = flow_.instance(i);
      if (instance.rank >= 0 && !work_.IsResident(instance.expert, instance.rank))
        candidates.emplace_back(instance.rows, i);
    }
    std::sort(candidates.begin(), candidates.end());
    for (const auto& [rows, i] : candidates) {
      saved_ = flow_;
      const RankCapacity saved_capacity = capacity_;
      Remove(i);
      if (flow_.Fit(capacity_, target)) continue;
      flow_ = saved_;
      capacity_ = saved_capacity;
    }
    DropIdle();
  }

  // One more replica across the cut that the last failed Fit left: an expert confined to the cut, to a rank
  // with room and a free slot. False when there is none.
  bool AddReplica(bool best_fit) {
    int64_t excess = 0;
    for (int32_t g : flow_.cut()) excess += flow_.load(g) - capacity_.RowsAt(limits_.target_level, g);
    // The expert of the cut with the most rows, and the runner-up for ranks that hold the first.
    ranked_.clear();
    for (int32_t e = 0; e < work_.num_experts; ++e)
      if (work_.rows[e] > 0 && Confined(e)) ranked_.emplace_back(-work_.rows[e], e);
    if (ranked_.empty()) return false;
    std::sort(ranked_.begin(), ranked_.end());
    const int64_t most = -ranked_[0].first;
    int32_t best = -1;
    int64_t best_room = 0;
    for (int32_t g = 0; g < work_.num_ranks; ++g) {
      if (flow_.InCut(g) || flow_.num_replicas(g) >= problem_.cluster.ranks[g].replica_slots) continue;
      int64_t limit = capacity_.RowsAt(limits_.target_level, g);
      if (!limits_.replica_rows.empty())
        limit = std::min(limit, capacity_.limit[g] - limits_.replica_rows[g]);
      const int64_t room = limit - flow_.load(g);
      if (room <= 0) continue;
      bool better = best < 0 || room > best_room;
      if (best_fit && best >= 0 && best_room >= excess) better = room >= excess && room < best_room;
      if (better) best = g, best_room = room;
    }
    if (best < 0) return false;
    // The smallest expert that is enough, else the largest.
    const int64_t wanted = std::min({best_room, excess, most});
    int32_t expert = ranked_[0].second;
    for (const auto& [negative_rows, e] : ranked_) {
      if (-negative_rows < wanted) break;
      expert = e;
      break;
    }
    Add(expert, best);
    return true;
  }

  bool Confined(int32_t e) const {
    for (int32_t i = e; i >= 0; i = flow_.instance(i).next_of_expert)
      if (!flow_.InCut(flow_.instance(i).rank)) return false;
    return true;
  }

  const PlanningProblem& problem_;
  const Workload& work_;
  const SearchLimits& limits_;
  RankCapacity capacity_;
  RowFlow flow_, saved_;
  std::vector<std::pair<int64_t, int32_t>> ranked_;
};

bool Better(const Outcome& a, const Outcome& b, double target) {
  const double level_a = std::max(a.level, target), level_b = std::max(b.level, target);
  if (level_a != level_b) return level_a < level_b;
  if (a.num_new != b.num_new) return a.num_new < b.num_new;
  return a.level < b.level;
}

}  // namespace

RowFlow SearchReplicas(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits) {
  Searcher searcher(problem, work, limits);
  Outcome best = searcher.Run(true, true);
  if (best.level <= limits.target_level && best.num_new == 0) return std::move(best.flow);
  const auto consider = [&](Outcome outcome) {
    if (Better(outcome, best, limits.target_level)) best = std::move(outcome);
  };
  consider(searcher.Run(true, false));
  if (work.any_resident) {
    consider(searcher.Run(false, true));
    consider(searcher.Run(false, false));
  }
  return std::move(best.flow);
}

RowFlow KeepReplicas(const PlanningProblem& problem, const Workload& work, const SearchLimits& limits,
                     bool residents) {
  return Searcher(problem, work, limits).Keep(residents).flow;
}

}  // namespace lrmoe::planner
