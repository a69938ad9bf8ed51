// simulate and drain.
#include <ostream>

#include "absl/strings/str_cat.h"
#include "common/plan_json.h"
#include "common/status_macros.h"
#include "common/table.h"
#include "proto/convert.h"
#include "tools/lrmoectl/fetch.h"
#include "tools/lrmoectl/json.h"

namespace lrmoe::ctl {
namespace {

v1::SimulatePlanRequest RequestOf(const Options& options) {
  v1::SimulatePlanRequest request;
  *request.mutable_recorded() = PlanRequest(ChosenInvocation(options), options.latest);
  request.set_planner(options.planner);
  for (const auto& [name, value] : options.changes) {
    v1::PolicySettings::Field* field = request.mutable_policy()->add_fields();
    field->set_name(name);
    field->set_value(value);
  }
  request.set_ranks(static_cast<int32_t>(options.ranks));
  request.set_has_memory_budget_bytes(options.memory_budget_bytes.has_value());
  request.set_memory_budget_bytes(options.memory_budget_bytes.value_or(0));
  request.set_has_replica_slots(options.replica_slots.has_value());
  request.set_replica_slots(static_cast<int32_t>(options.replica_slots.value_or(0)));
  request.set_no_residents(options.no_residents);
  return request;
}

}  // namespace

absl::Status SimulatePlanCommand(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  LRMOE_ASSIGN_OR_RETURN(const v1::SimulatePlanResponse response, client.SimulatePlan(RequestOf(options)));
  LRMOE_ASSIGN_OR_RETURN(const PlanRecord recorded, ParseRecord(client, response.recorded()));
  absl::StatusOr<LayerPlan> simulated = SimulatedFromWire(response.simulated());
  if (!simulated.ok())
    return absl::InternalError(absl::StrCat("controller at ", client.address(),
                                            " sent a plan that is not one: ", simulated.status().message()));
  if (options.output == "json") {
    Json json = ToJson(recorded.plan.invocation);
    json["recorded"] = PlanToJson(recorded.plan);
    json["simulated"] = PlanToJson(*simulated);
    console.out << Dump(json);
    return absl::OkStatus();
  }
  const PlanRecord after{*std::move(simulated), recorded.planned_at_ms, {}};
  console.out << "Before: planned by " << Printable(recorded.plan.policy) << ". After: simulated with "
              << Printable(after.plan.policy) << " on the same counts; nothing was changed.\n"
              << DiffPlans(recorded, after, ViewOf(options, console));
  return absl::OkStatus();
}

absl::Status DrainWorkers(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  v1::DrainRequest request;
  request.set_reason(options.reason);
  LRMOE_ASSIGN_OR_RETURN(const v1::DrainResponse response, client.Drain(request));
  if (options.output == "json") {
    console.out << Dump({{"ranks", response.ranks()}});
  } else {
    console.out << "asked " << response.ranks() << (response.ranks() == 1 ? " rank" : " ranks")
                << " to leave\n";
  }
  return absl::OkStatus();
}

}  // namespace lrmoe::ctl
