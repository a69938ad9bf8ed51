#include "controller/planner/workload.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace lrmoe::planner {

namespace {

// Blocked transpose; sums fall out on the way.
void ReadCounts(const RoutedCounts& counts, Workload& out) {
  constexpr int32_t kBlock = 32;
  const int32_t num_experts = out.num_experts, num_ranks = out.num_ranks;
  out.by_source.resize(static_cast<size_t>(num_experts) * num_ranks);
  out.rows.assign(num_experts, 0);
  out.source_pairs.assign(num_ranks, 0);
  for (int32_t s0 = 0; s0 < num_ranks; s0 += kBlock) {
    const int32_t s1 = std::min(num_ranks, s0 + kBlock);
    for (int32_t e0 = 0; e0 < num_experts; e0 += kBlock) {
      const int32_t e1 = std::min(num_experts, e0 + kBlock);
      for (int32_t s = s0; s < s1; ++s) {
        const int64_t* row = counts.source(s).data();
        int64_t sum = 0;
        for (int32_t e = e0; e < e1; ++e) {
          out.by_source[static_cast<size_t>(e) * num_ranks + s] = row[e];
          out.rows[e] += row[e];
          sum += row[e];
        }
        out.source_pairs[s] += sum;
      }
    }
  }
  out.total = std::accumulate(out.rows.begin(), out.rows.end(), int64_t{0});
}

}  // namespace

Workload MakeWorkload(const PlanningProblem& problem) {
  Workload out;
  out.num_experts = problem.counts.num_experts();
  out.num_ranks = problem.counts.num_sources();
  ReadCounts(problem.counts, out);
  out.num_owned.assign(out.num_ranks, 0);
  std::vector<int64_t> load(out.num_ranks, 0);
  for (int32_t e = 0; e < out.num_experts; ++e) {
    ++out.num_owned[problem.owner[e]];
    load[problem.owner[e]] += out.rows[e];
  }
  out.all_ranks.resize(out.num_ranks);
  std::iota(out.all_ranks.begin(), out.all_ranks.end(), 0);
  out.resident.assign(static_cast<size_t>(out.num_experts) * out.num_ranks, 0);
  for (int32_t g = 0; g < static_cast<int32_t>(problem.resident.size()); ++g) {
    for (int32_t e : problem.resident[g]) {
      out.resident[static_cast<size_t>(e) * out.num_ranks + g] = 1;
      out.any_resident = true;
    }
  }
  std::vector<double> rates(out.num_ranks);
  for (int32_t g = 0; g < out.num_ranks; ++g) rates[g] = problem.cluster.ranks[g].rows_per_ms;
  out.capacity = MakeCapacity(rates);
  for (int32_t g = 0; g < out.num_ranks; ++g) {
    out.total_weight += out.capacity.weight[g];
    out.owner_level = std::max(out.owner_level, static_cast<double>(load[g]) / out.capacity.weight[g]);
  }
  MemoryModelOptions model = problem.model;
  model.exact_router_gradient = problem.policy.router_gradient == RouterGradient::kExact;
  out.memory = ComputeMemoryCoefficients(model);
  return out;
}

double Workload::TargetLevel(int64_t total_rows, double tolerance) const {
  return std::max((1.0 + tolerance) * static_cast<double>(total_rows) / total_weight,
                  capacity.LeastLevel(total_rows, all_ranks));
}

int64_t CeilRows(double rate, int64_t rows) {
  const double product = rate * static_cast<double>(rows);
  const double nearest = std::nearbyint(product);
  if (std::abs(product - nearest) <= static_cast<double>(rows) * 0x1p-50)
    return static_cast<int64_t>(nearest);
  return static_cast<int64_t>(std::ceil(product));
}

}  // namespace lrmoe::planner
