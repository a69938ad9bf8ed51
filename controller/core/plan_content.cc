#include "controller/core/plan_content.h"

#include <algorithm>

namespace lrmoe::core {

std::optional<ContentDifference> FindDifference(std::span<const int64_t> first,
                                                std::span<const int64_t> second) {
  for (size_t expert = 0; expert < std::max(first.size(), second.size()); ++expert) {
    const int64_t a = expert < first.size() ? first[expert] : 0;
    const int64_t b = expert < second.size() ? second[expert] : 0;
    if (a != b) return ContentDifference{static_cast<int32_t>(expert), a, b};
  }
  return std::nullopt;
}

std::optional<ContentDifference> FindDifference(const LayerPlan& plan, int32_t source_idx,
                                                std::span<const int64_t> counts) {
  std::vector<int64_t> planned(plan.quota.size(), 0);
  for (const InstancePlan& instance : plan.instances)
    planned[instance.expert_idx] += instance.forward_rows_by_source[source_idx];
  return FindDifference(planned, counts);
}

int64_t RoutedRows(const LayerPlan& plan) {
  int64_t rows = 0;
  for (const InstancePlan& instance : plan.instances) rows += instance.forward_rows;
  return rows;
}

std::vector<std::vector<int32_t>> ReplicasOf(const LayerPlan& plan) {
  std::vector<std::vector<int32_t>> replicas(plan.ranks.size());
  for (const InstancePlan& instance : plan.instances)  // by expert, so each list comes out ascending
    if (!instance.owner) replicas[instance.rank_idx].push_back(instance.expert_idx);
  return replicas;
}

int64_t ApproximateBytes(const LayerPlan& plan) {
  size_t bytes = sizeof(LayerPlan) + plan.quota.size() * sizeof(int64_t) +
                 plan.ranks.size() * sizeof(RankPlan) +
                 plan.rejected.size() * (sizeof(RejectedCandidate) + 64);
  for (const InstancePlan& instance : plan.instances)
    bytes += sizeof(InstancePlan) + instance.forward_rows_by_source.size() * sizeof(int64_t);
  return static_cast<int64_t>(bytes);
}

}  // namespace lrmoe::core
