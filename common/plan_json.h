// A plan as JSON, format "lrmoe-plan" version 1: what every program prints under --output json. Field names
// are stable; numbers carry their unit in the name.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "common/plan.h"

namespace lrmoe {

// {format, version, policy, feasible, retention_rate, quota, instances, ranks, imbalance, new_replicas,
// predicted_us, rejected, plan_us}; the invocation is not part of it. Keys keep this order.
nlohmann::ordered_json PlanToJson(const LayerPlan& plan);

// Parts of it, which other views show too.
nlohmann::ordered_json ToJson(const ImbalanceSummary& imbalance);
nlohmann::ordered_json ToJson(const MemoryBytes& bytes);
nlohmann::ordered_json ToJson(const PredictedTime& time);
nlohmann::ordered_json ToJson(const RejectedCandidate& rejected);

}  // namespace lrmoe
