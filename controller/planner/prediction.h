// What a candidate plan will need: bytes per rank and time by component. The same model for every policy.
#pragma once

#include <cstdint>
#include <vector>

#include "common/plan.h"
#include "controller/planner/placed_rows.h"
#include "controller/planner/source_split.h"

namespace lrmoe::planner {

// A candidate of Algorithm 1: forward rows with their split, quotas, backward rows.
struct Candidate {
  const PlacedRows* placed = nullptr;
  const SourceSplit* split = nullptr;
  std::vector<int64_t> quota;     // [E]
  std::vector<int64_t> backward;  // [I] X[e][i]
  int64_t kept = 0;               // sum of quota
};

// Bytes of each rank. Which pairs survive is unknown: staging covers the most rows that any outcome makes a
// rank send to another instance, sum over its instances of max(0, min(F, K_e) - X).
std::vector<RankPlan> PredictRanks(const PlanningProblem& problem, const Workload& work,
                                   const Candidate& candidate);

// Times of the critical rank, microseconds. A row's service time is one third forward, two thirds backward;
// links are full duplex, a rank's links inside and between nodes are charged one after the other. Dispatch
// includes the worst-case moves of saved state, gradients the replicas' gradient sums.
PredictedTime PredictTime(const PlanningProblem& problem, const Workload& work, const Candidate& candidate);

// Communication that has to fit in policy.window_us.
inline double CommunicationUs(const PredictedTime& time) {
  return time.weights + time.dispatch + time.return_ + time.gradients;
}

}  // namespace lrmoe::planner
