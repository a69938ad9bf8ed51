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
  const MemoryBytes& bytes = rank.memory_bytes;
  return {{"forward_rows", rank.forward_rows},
          {"backward_rows", rank.backward_rows},
          {"memory_bytes",
           {{"experts", bytes.experts},
            {"replicas", bytes.replicas},
            {"tokens", bytes.tokens},
            {"staging", bytes.staging},
            {"total", bytes.total()}}}};
}

Json RejectedToJson(const RejectedCandidate& rejected) {
  return {{"retention_rate", rejected.retention_rate},
          {"constraint", rejected.constraint},
          {"where", rejected.where},
          {"needed", rejected.needed},
          {"available", rejected.available},
          {"unit", rejected.unit}};
}

}  // namespace

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
  out["imbalance"] = {{"before", plan.imbalance.before},
                      {"forward", plan.imbalance.forward},
                      {"backward", plan.imbalance.backward}};
  out["new_replicas"] = plan.new_replicas;
  out["predicted_us"] = {{"weights", plan.predicted_us.weights},
                         {"dispatch", plan.predicted_us.dispatch},
                         {"compute", plan.predicted_us.compute},
                         {"return", plan.predicted_us.return_},
                         {"gradients", plan.predicted_us.gradients}};
  out["rejected"] = Json::array();
  for (const RejectedCandidate& rejected : plan.rejected) out["rejected"].push_back(RejectedToJson(rejected));
  out["plan_us"] = plan.plan_us;
  return out;
}

}  // namespace lrmoe
