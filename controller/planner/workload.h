// What is derived once from a problem, before any candidate is looked at.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "common/memory_model.h"
#include "controller/planner/problem.h"
#include "controller/planner/row_flow.h"

namespace lrmoe::planner {

struct Workload {
  int32_t num_experts = 0;
  int32_t num_ranks = 0;
  int64_t total = 0;                  // N
  std::vector<int64_t> rows;          // N_e, [E]
  std::vector<int64_t> by_source;     // n[s][e] transposed to [E][S], so that one expert is contiguous
  std::vector<int64_t> source_pairs;  // pairs of each rank as a source, [G]
  std::vector<int32_t> num_owned;     // [G]
  std::vector<int32_t> all_ranks;     // 0..G-1
  std::vector<uint8_t> resident;      // [E * G]: 1 where the rank holds the expert as a replica
  bool any_resident = false;
  RankCapacity capacity;    // service rates; no limits
  double total_weight = 0;  // sum of capacity.weight
  MemoryCoefficients memory;
  double owner_level = 0;  // peak level when every expert runs at its owner

  std::span<const int64_t> sources_of(int32_t expert_idx) const {
    return {by_source.data() + static_cast<size_t>(expert_idx) * num_ranks, static_cast<size_t>(num_ranks)};
  }
  bool IsResident(int32_t expert_idx, int32_t rank_idx) const {
    return resident[static_cast<size_t>(expert_idx) * num_ranks + rank_idx] != 0;
  }
  // The level the balance tolerance allows for `total_rows` spread over all ranks; never below what whole
  // rows allow.
  double TargetLevel(int64_t total_rows, double tolerance) const;
};

// The problem must have passed Validate.
Workload MakeWorkload(const PlanningProblem& problem);

// ceil(rate * rows) that does not take a rounding error of the product for a fraction of a row.
int64_t CeilRows(double rate, int64_t rows);

}  // namespace lrmoe::planner
