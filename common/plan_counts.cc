#include "common/plan_counts.h"

namespace lrmoe {

RoutedCounts CountsOf(const LayerPlan& plan) {
  RoutedCounts counts(static_cast<int32_t>(plan.ranks.size()), static_cast<int32_t>(plan.quota.size()));
  for (const InstancePlan& instance : plan.instances)
    for (int32_t source = 0; source < counts.num_sources(); ++source)
      counts.at(source, instance.expert_idx) += instance.forward_rows_by_source[source];
  return counts;
}

std::vector<int64_t> RoutedRowsByExpert(const LayerPlan& plan) {
  std::vector<int64_t> routed(plan.quota.size(), 0);
  for (const InstancePlan& instance : plan.instances) routed[instance.expert_idx] += instance.forward_rows;
  return routed;
}

}  // namespace lrmoe
