#include "common/plan_json.h"

#include <nlohmann/json.hpp>

namespace lrmoe {
namespace {

using Json = nlohmann::ordered_json;

Json InstanceToJson(const InstancePlan& instance) {
  return {{"expert", instance.expert_idx},
          {"rank", instance.rank_idx},
          {"owner", instance.owner},
          {"new", instance.is_new},
          {"forward_rows", instance.forward_rows},
          {"backward_rows", instance.backward_rows},
          {"forward_rows_by_source", instance.forward_rows_by_source}};
}

Json RankToJson(const RankPlan& rank) {
  return {{"forward_rows", rank.forward_rows},
          {"backward_rows", rank.backward_rows},
          {"memory_bytes", ToJson(rank.memory_bytes)}};
}

}  // namespace

Json ToJson(const ImbalanceSummary& imbalance) {
  return {{"before", imbalance.before}, {"forward", imbalance.forward}, {"backward", imbalance.backward}};
}

Json ToJson(const MemoryBytes& bytes) {
  return {{"experts", bytes.experts},
          {"replicas", bytes.replicas},
          {"tokens", bytes.tokens},
          {"staging", bytes.staging},
          {"total", bytes.total()}};
}

Json ToJson(const PredictedTime& time) {
  return {{"weights", time.weights},
          {"dispatch", time.dispatch},
          {"compute", time.compute},
          {"return", time.return_},
          {"gradients", time.gradients}};
}

Json ToJson(const RejectedCandidate& rejected) {
  return {{"retention_rate", rejected.retention_rate},
          {"constraint", rejected.constraint},
          {"where", rejected.where},
          {"needed", rejected.needed},
          {"available", rejected.available},
          {"unit", rejected.unit}};
}

Json PlanToJson(const LayerPlan& plan) {
  Json out = {{"format", "lrmoe-plan"},
              {"version", 1},
              {"policy", plan.policy},
              {"feasible", plan.feasible},
              {"retention_rate", plan.retention_rate},
              {"quota", plan.quota},
              {"instances", Json::array()},
              {"ranks", Json::array()}};
  for (const InstancePlan& instance : plan.instances) out["instances"].push_back(InstanceToJson(instance));
  for (const RankPlan& rank : plan.ranks) out["ranks"].push_back(RankToJson(rank));
  out["imbalance"] = ToJson(plan.imbalance);
  out["new_replicas"] = plan.new_replicas;
  out["predicted_us"] = ToJson(plan.predicted_us);
  out["rejected"] = Json::array();
  for (const RejectedCandidate& rejected : plan.rejected) out["rejected"].push_back(ToJson(rejected));
  out["plan_us"] = plan.plan_us;
  return out;
}

}  // namespace lrmoe
