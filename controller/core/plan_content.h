// Facts about a plan that the core needs: the counts it was made of, its replicas, its size.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "common/plan.h"

namespace lrmoe::core {

struct ContentDifference {
  int32_t expert_idx = 0;  // the first that differs
  int64_t first = 0, second = 0;
};

// Between two counts of one source; a missing expert counts as 0.
std::optional<ContentDifference> FindDifference(std::span<const int64_t> first,
                                                std::span<const int64_t> second);
// Between the counts of `source_idx` that `plan` was made of and `counts`.
std::optional<ContentDifference> FindDifference(const LayerPlan& plan, int32_t source_idx,
                                                std::span<const int64_t> counts);

int64_t RoutedRows(const LayerPlan& plan);

// [G] experts held as replicas under the plan, ascending.
std::vector<std::vector<int32_t>> ReplicasOf(const LayerPlan& plan);

// Memory that keeping the plan takes.
int64_t ApproximateBytes(const LayerPlan& plan);

}  // namespace lrmoe::core
