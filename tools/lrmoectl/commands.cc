#include <ostream>

#include "common/status_macros.h"
#include "tools/lrmoectl/client.h"
#include "tools/lrmoectl/fetch.h"
#include "tools/lrmoectl/options.h"
#include "tools/lrmoectl/render.h"

namespace lrmoe::ctl {

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
