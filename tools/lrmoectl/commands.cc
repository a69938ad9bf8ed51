#include <algorithm>
#include <ostream>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "proto/convert.h"
#include "tools/lrmoectl/client.h"
#include "tools/lrmoectl/options.h"
#include "tools/lrmoectl/render.h"

namespace lrmoe::ctl {
namespace {

constexpr int64_t kMaxPageSize = 1000;  // of ListPlansRequest

View ViewOf(const Options& options, const Console& console) {
  return {.json = options.output == "json", .colour = console.colour};
}

AdminClient Connect(const Options& options) {
  return AdminClient(options.controller, options.timeout);
}

absl::StatusOr<PlanRecord> FetchPlan(AdminClient& client, const Invocation& invocation, bool latest) {
  v1::GetPlanRequest request;
  request.mutable_invocation()->set_step(invocation.step);
  request.mutable_invocation()->set_layer(invocation.layer);
  request.mutable_invocation()->set_micro_batch(invocation.micro_batch);
  request.set_latest(latest);
  LRMOE_ASSIGN_OR_RETURN(const v1::PlanRecord wire, client.GetPlan(request));
  if (!wire.error().empty()) {
    LRMOE_ASSIGN_OR_RETURN(const Invocation failed, lrmoe::FromWire(wire.plan().invocation()));
    return absl::FailedPreconditionError(
        absl::StrCat("no plan was made of ", ToString(failed), ": ", wire.error()));
  }
  absl::StatusOr<PlanRecord> record = FromWire(wire);
  if (!record.ok())
    return absl::InternalError(absl::StrCat("controller at ", client.address(),
                                            " sent a plan that is not one: ", record.status().message()));
  return record;
}

absl::StatusOr<PlanRecord> FetchPlan(AdminClient& client, const Options& options) {
  const Invocation invocation{options.step.value_or(0), static_cast<int32_t>(options.layer),
                              static_cast<int32_t>(options.micro_batch)};
  return FetchPlan(client, invocation, options.latest);
}

// Follows pages until `limit` plans are there or the list ends; next_page_token continues after the last one.
absl::StatusOr<v1::ListPlansResponse> FetchPlans(AdminClient& client, const PlanFilter& filter) {
  v1::ListPlansRequest request;
  request.set_from_step(filter.from_step);
  request.set_has_to_step(filter.to_step.has_value());
  request.set_to_step(filter.to_step.value_or(0));
  request.set_has_layer(filter.layer.has_value());
  request.set_layer(static_cast<int32_t>(filter.layer.value_or(0)));
  request.set_infeasible_only(filter.infeasible_only);
  request.set_page_token(filter.page_token);
  v1::ListPlansResponse all;
  while (true) {
    const int64_t missing = filter.limit - all.plans_size();
    request.set_page_size(static_cast<int32_t>(std::min(missing, kMaxPageSize)));
    LRMOE_ASSIGN_OR_RETURN(v1::ListPlansResponse page, client.ListPlans(request));
    if (page.plans_size() > missing)
      return absl::InternalError(absl::StrCat("controller at ", client.address(), " sent ", page.plans_size(),
                                              " plans where at most ", missing, " were asked for"));
    for (v1::PlanRecord& plan : *page.mutable_plans()) all.add_plans()->Swap(&plan);
    all.set_next_page_token(page.next_page_token());
    if (page.next_page_token().empty() || all.plans_size() >= filter.limit) return all;
    if (page.plans().empty() || page.next_page_token() == request.page_token())
      return absl::InternalError(
          absl::StrCat("controller at ", client.address(), " sent a page without progress"));
    request.set_page_token(page.next_page_token());
  }
}

}  // namespace

absl::Status ShowStatus(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  LRMOE_ASSIGN_OR_RETURN(const v1::ControllerStatus status, client.GetStatus());
  console.out << RenderStatus(status, client.address(), ViewOf(options, console));
  return absl::OkStatus();
}

absl::Status ShowWorkers(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  LRMOE_ASSIGN_OR_RETURN(const v1::ListWorkersResponse workers, client.ListWorkers());
  console.out << RenderWorkers(workers, ViewOf(options, console));
  return absl::OkStatus();
}

absl::Status ShowLayers(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  LRMOE_ASSIGN_OR_RETURN(const v1::ListLayersResponse layers, client.ListLayers());
  console.out << RenderLayers(layers, ViewOf(options, console));
  return absl::OkStatus();
}

absl::Status ListPlans(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  LRMOE_ASSIGN_OR_RETURN(const v1::ListPlansResponse plans, FetchPlans(client, options.filter));
  console.out << RenderPlanList(plans, ViewOf(options, console));
  return absl::OkStatus();
}

absl::Status ShowPlan(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  LRMOE_ASSIGN_OR_RETURN(const PlanRecord record, FetchPlan(client, options));
  console.out << RenderPlan(record, ViewOf(options, console));
  return absl::OkStatus();
}

absl::Status ExplainPlanCommand(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  LRMOE_ASSIGN_OR_RETURN(const PlanRecord record, FetchPlan(client, options));
  console.out << ExplainPlan(record, ViewOf(options, console));
  return absl::OkStatus();
}

absl::Status DiffPlansCommand(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  LRMOE_ASSIGN_OR_RETURN(const PlanRecord before, FetchPlan(client, options.diff[0], false));
  LRMOE_ASSIGN_OR_RETURN(const PlanRecord after, FetchPlan(client, options.diff[1], false));
  console.out << DiffPlans(before, after, ViewOf(options, console));
  return absl::OkStatus();
}

absl::Status WatchPlans(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  v1::WatchPlansRequest request;
  request.set_has_layer(options.filter.layer.has_value());
  request.set_layer(static_cast<int32_t>(options.filter.layer.value_or(0)));
  int64_t seen = 0;
  return client.WatchPlans(request, options.watch_for, [&](const v1::PlanRecord& record) {
    console.out << RenderPlanLine(record, ViewOf(options, console)) << std::flush;
    return console.out.good() && ++seen != options.watch_count;
  });
}

absl::Status ShowPolicy(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  LRMOE_ASSIGN_OR_RETURN(const v1::PolicySettings policy, client.GetPolicy());
  console.out << RenderPolicy(policy, ViewOf(options, console));
  return absl::OkStatus();
}

absl::Status ChangePolicy(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  v1::SetPolicyRequest request;
  for (const auto& [name, value] : options.changes) {
    v1::PolicySettings::Field* field = request.mutable_policy()->add_fields();
    field->set_name(name);
    field->set_value(value);
  }
  LRMOE_ASSIGN_OR_RETURN(const v1::SetPolicyResponse change, client.SetPolicy(request));
  console.out << RenderPolicyChange(change, ViewOf(options, console));
  return absl::OkStatus();
}

}  // namespace lrmoe::ctl
