// The experts of each rank, the largest first.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

#include "controller/planner/problem.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

class OwnedExperts {
 public:
  OwnedExperts(const PlanningProblem& problem, const Workload& work)
      : experts_(work.num_experts), first_(work.num_ranks + 1, 0), rows_(work.num_ranks, 0) {
    for (int32_t e = 0; e < work.num_experts; ++e) {
      ++first_[problem.owner[e] + 1];
      rows_[problem.owner[e]] += work.rows[e];
    }
    for (int32_t g = 0; g < work.num_ranks; ++g) first_[g + 1] += first_[g];
    std::vector<int32_t> next(first_.begin(), first_.end() - 1);
    for (int32_t e = 0; e < work.num_experts; ++e) experts_[next[problem.owner[e]]++] = e;
    for (int32_t g = 0; g < work.num_ranks; ++g)
      std::sort(experts_.begin() + first_[g], experts_.begin() + first_[g + 1], [&](int32_t a, int32_t b) {
        return work.rows[a] != work.rows[b] ? work.rows[a] > work.rows[b] : a < b;
      });
  }

  // By rows descending, ties to the lowest expert.
  std::span<const int32_t> of(int32_t rank_idx) const {
    return {experts_.data() + first_[rank_idx], experts_.data() + first_[rank_idx + 1]};
  }
  // Their rows together.
  int64_t rows(int32_t rank_idx) const { return rows_[rank_idx]; }

 private:
  std::vector<int32_t> experts_;  // by owner
  std::vector<int32_t> first_;    // [G + 1]
  std::vector<int64_t> rows_;     // [G]
};

}  // namespace lrmoe::planner
