#include "tools/lrmoectl/json.h"

#include <numeric>

namespace lrmoe::ctl {
namespace {

Json ToJson(const InvocationReport::Phases& phases, bool backward) {
  Json json = {{"plan", phases.plan_ms},
               {"weights", phases.weights_ms},
               {"dispatch", phases.dispatch_ms},
               {"compute", phases.compute_ms},
               {"return", phases.return_ms}};
  if (backward) {
    json["score"] = phases.score_ms;
    json["select"] = phases.select_ms;
    json["pack"] = phases.pack_ms;
    json["gradients"] = phases.gradients_ms;
  }
  json["total"] = phases.total_ms;
  json["cpu"] = phases.cpu_ms;
  return json;
}

}  // namespace

std::string Dump(const Json& json) {
  return json.dump(2, ' ', false, Json::error_handler_t::replace) + "\n";
}

std::string DumpLine(const Json& json) {
  return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Json ToJson(const Invocation& invocation) {
  return {{"step", invocation.step}, {"layer", invocation.layer}, {"micro_batch", invocation.micro_batch}};
}

Json ToJson(const RankReport& rank) {
  const InvocationReport& report = rank.report;
  return {{"rank", rank.rank},
          {"forward_ms", ToJson(report.forward, false)},
          {"backward_ms", ToJson(report.backward, true)},
          {"routed_rows", report.routed_rows},
          {"kept_rows", report.kept_rows},
          {"forward_rows", report.forward_rows},
          {"backward_rows", report.backward_rows},
          {"moved_rows", report.moved_rows},
          {"dispatch_bytes", report.dispatch_bytes},
          {"return_bytes", report.return_bytes},
          {"scalar_bytes", report.scalar_bytes},
          {"peak_bytes", report.peak_bytes},
          {"predicted_bytes", report.predicted_bytes},
          {"kept_score", report.kept_score},
          {"total_score", report.total_score}};
}

Json PlanSummaryJson(const v1::PlanRecord& record) {
  const v1::LayerPlan& plan = record.plan();
  return {{"step", plan.invocation().step()},
          {"layer", plan.invocation().layer()},
          {"micro_batch", plan.invocation().micro_batch()},
          {"policy", plan.policy()},
          {"feasible", plan.feasible()},
          {"retention_rate", plan.retention_rate()},
          {"routed_rows", record.routed_rows()},
          {"kept_rows", std::accumulate(plan.quota().begin(), plan.quota().end(), int64_t{0})},
          {"imbalance",
           {{"before", plan.imbalance().before()},
            {"forward", plan.imbalance().forward()},
            {"backward", plan.imbalance().backward()}}},
          {"new_replicas", plan.new_replicas()},
          {"plan_us", plan.plan_us()},
          {"planned_at_ms", record.planned_at_ms()},
          {"epoch", record.epoch()},
          {"error", record.error()}};
}

}  // namespace lrmoe::ctl
