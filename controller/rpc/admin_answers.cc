#include "controller/rpc/admin_answers.h"

#include <algorithm>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/version.h"
#include "controller/core/what_if.h"
#include "proto/convert.h"
#include "proto/range.h"

namespace lrmoe::rpc {
namespace {

absl::Status OutOfRange(absl::string_view field, int64_t value, int64_t low, int64_t high) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; allowed: ", low, "..", high));
}

int64_t KeptRows(const LayerPlan& plan) {
  int64_t rows = 0;
  for (int64_t quota : plan.quota) rows += quota;
  return rows;
}

}  // namespace

void FillStatus(const Server::View& view, v1::ControllerStatus* out) {
  core::Core& core = view.core;
  out->set_version(std::string(Version()));
  out->set_uptime_s(static_cast<double>(view.uptime_us) * 1e-6);
  out->set_epoch(static_cast<uint64_t>(core.epoch()));
  out->set_epoch_state(std::string(Name(core.state())));
  out->set_epoch_reason(core.reason());
  out->set_ranks_expected(core.ranks_expected());
  int32_t connected = 0;
  for (const core::Member& member : core.members())
    connected += member.state == core::MemberState::kConnected;
  out->set_ranks_connected(connected);
  if (core.model().has_value()) ToWire(*core.model(), out->mutable_model());
  out->set_current_step(core.current_step());
  out->set_plans_made(view.history.num_made());
  out->set_plans_infeasible(view.history.num_infeasible());
  out->set_plan_us_p50(view.history.PlanMicroseconds(0.5));
  out->set_plan_us_p99(view.history.PlanMicroseconds(0.99));
  for (int32_t rank : core.MissingRanks(view.now_us)) out->add_missing_ranks(rank);
  if (view.store == nullptr) return;
  const store::StoreState state = view.store->state();
  out->mutable_state_dir()->set_path(state.directory);
  out->mutable_state_dir()->set_waiting(state.waiting);
  out->mutable_state_dir()->set_lost(state.lost);
  out->mutable_state_dir()->set_error(state.error);
}

void FillWorkers(const Server::View& view, v1::ListWorkersResponse* out) {
  const std::vector<core::Member>& members = view.core.members();
  for (size_t rank = 0; rank < members.size(); ++rank) {
    const core::Member& member = members[rank];
    if (member.state == core::MemberState::kAbsent) continue;
    v1::WorkerStatus* worker = out->add_workers();
    worker->set_rank(static_cast<int32_t>(rank));
    worker->set_node(member.hello.node);
    worker->set_device(member.hello.device);
    worker->set_state(std::string(Name(member.state)));
    worker->set_memory_budget_bytes(member.hello.memory_budget_bytes);
    worker->set_replica_slots(member.hello.replica_slots);
    worker->set_rows_per_ms(member.hello.rows_per_ms);
    worker->set_current_step(member.current_step);
    worker->set_last_seen_s(static_cast<double>(std::max<int64_t>(0, view.now_us - member.last_seen_us)) *
                            1e-6);
    worker->set_peak_bytes(member.peak_bytes);
    worker->set_version(member.hello.version);
  }
}

void FillLayers(const Server::View& view, v1::ListLayersResponse* out) {
  for (const auto& [index, summary] : view.history.Layers()) {
    const LayerPlan& plan = summary.last->plan;
    v1::LayerStatus* layer = out->add_layers();
    layer->set_layer(index);
    layer->set_last_step(plan.invocation.step);
    layer->set_retention_rate(plan.retention_rate);
    layer->set_retention_rate_mean(summary.mean_retention);
    layer->mutable_imbalance()->set_before(plan.imbalance.before);
    layer->mutable_imbalance()->set_forward(plan.imbalance.forward);
    layer->mutable_imbalance()->set_backward(plan.imbalance.backward);
    layer->set_replicas(
        static_cast<int32_t>(std::count_if(plan.instances.begin(), plan.instances.end(),
                                           [](const InstancePlan& instance) { return !instance.owner; })));
    layer->set_new_replicas(plan.new_replicas);
    layer->set_routed_rows(summary.routed_rows);
    layer->set_kept_rows(KeptRows(plan));
  }
}

absl::Status FillPlans(const Server::View& view, const v1::ListPlansRequest& request,
                       v1::ListPlansResponse* out) {
  core::History::Filter filter;
  if (request.from_step() < 0) return OutOfRange("from_step", request.from_step(), 0, kMaxStep);
  filter.from_step = request.from_step();
  if (request.has_to_step() || request.to_step() != 0) {
    if (request.to_step() < request.from_step())
      return OutOfRange("to_step", request.to_step(), request.from_step(), kMaxStep);
    filter.to_step = request.to_step();
  }
  if (request.has_layer()) {
    if (request.layer() < 0 || request.layer() >= kMaxLayers)
      return OutOfRange("layer", request.layer(), 0, kMaxLayers - 1);
    filter.layer = request.layer();
  }
  if (request.page_size() < 0 || request.page_size() > 1000)
    return OutOfRange("page_size", request.page_size(), 0, 1000);
  if (request.page_size() > 0) filter.limit = static_cast<size_t>(request.page_size());
  filter.infeasible_only = request.infeasible_only();
  if (!request.page_token().empty() && !absl::SimpleAtoi(request.page_token(), &filter.before_number))
    return absl::InvalidArgumentError(absl::StrCat("page_token is \"", request.page_token(),
                                                   "\"; allowed: a next_page_token of this call"));
  bool more = false;
  const std::vector<const core::PlanRecord*> records = view.history.List(filter, &more);
  for (const core::PlanRecord* record : records) FillRecord(*record, false, out->add_plans());
  if (more) out->set_next_page_token(absl::StrCat(records.back()->number));
  return absl::OkStatus();
}

namespace {

absl::StatusOr<const core::PlanRecord*> FindRecord(const Server::View& view,
                                                   const v1::GetPlanRequest& request) {
  LRMOE_ASSIGN_OR_RETURN(const Invocation invocation, FromWire(request.invocation()));
  const core::PlanRecord* record =
      request.latest() ? view.history.FindLatest(invocation.layer) : view.history.Find(invocation);
  if (record != nullptr) return record;
  const std::string what = request.latest() ? absl::StrCat("layer ", invocation.layer) : ToString(invocation);
  return absl::NotFoundError(absl::StrCat("no plan of ", what, " among the last ", view.history.num_kept()));
}

}  // namespace

absl::Status FillPlan(const Server::View& view, const v1::GetPlanRequest& request, v1::PlanRecord* out) {
  LRMOE_ASSIGN_OR_RETURN(const core::PlanRecord* const record, FindRecord(view, request));
  FillRecord(*record, true, out);
  return absl::OkStatus();
}

absl::StatusOr<planner::PlanningProblem> WhatIfOf(const Server::View& view,
                                                  const v1::SimulatePlanRequest& request,
                                                  v1::PlanRecord* recorded) {
  core::WhatIf change;
  LRMOE_ASSIGN_OR_RETURN(change.policy, ApplyWire(view.core.newest_policy(), request.policy()));
  for (const v1::PolicySettings::Field& field : request.policy().fields())
    if (field.name() == "planner")
      return absl::InvalidArgumentError(
          "policy names \"planner\"; allowed: the field planner of the request");
  LRMOE_RETURN_IF_ERROR(wire::Text("planner", request.planner(), 0, 64));
  change.planner = request.planner();
  if (request.ranks() < 0 || request.ranks() > kMaxRanks)
    return OutOfRange("ranks", request.ranks(), 0, kMaxRanks);
  change.ranks = request.ranks();
  if (request.has_memory_budget_bytes()) {
    if (request.memory_budget_bytes() < 0)
      return OutOfRange("memory_budget_bytes", request.memory_budget_bytes(), 0, INT64_MAX);
    change.memory_budget_bytes = request.memory_budget_bytes();
  }
  if (request.has_replica_slots()) {
    if (request.replica_slots() < 0 || request.replica_slots() > kMaxExperts)
      return OutOfRange("replica_slots", request.replica_slots(), 0, kMaxExperts);
    change.replica_slots = request.replica_slots();
  }
  change.no_residents = request.no_residents();
  LRMOE_ASSIGN_OR_RETURN(const core::PlanRecord* const record, FindRecord(view, request.recorded()));
  FillRecord(*record, true, recorded);
  return core::MakeWhatIfProblem(view.core, view.history, *record, change);
}

void FillRecord(const core::PlanRecord& record, bool whole, v1::PlanRecord* out) {
  const LayerPlan& plan = record.plan->plan;
  if (!record.error.empty()) {
    ToWire(plan.invocation, out->mutable_plan()->mutable_invocation());
    out->set_error(record.error);
  } else if (whole) {
    ToWire(plan, out->mutable_plan());
  } else {
    LayerPlan brief = plan;
    brief.instances.clear();
    brief.rejected.clear();
    ToWire(brief, out->mutable_plan());
  }
  out->set_routed_rows(record.routed_rows);
  out->set_planned_at_ms(record.planned_at_ms);
  out->set_epoch(static_cast<uint64_t>(record.epoch));
  if (!whole) return;
  for (const auto& [rank, report] : record.reports) {
    v1::RankReport* to = out->add_reports();
    to->set_rank(rank);
    ToWire(report, to->mutable_report());
  }
}

}  // namespace lrmoe::rpc
