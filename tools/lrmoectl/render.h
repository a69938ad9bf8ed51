// What lrmoectl prints of the controller's answers: a table for people or JSON with stable field names.
// Pure functions; every result ends with a line break.
#pragma once

#include <string>

#include "absl/strings/string_view.h"
#include "lrmoe/v1/admin.pb.h"
#include "tools/lrmoectl/plan_record.h"

namespace lrmoe::ctl {

struct View {
  bool json = false;
  bool colour = false;  // only of tables
};

std::string RenderStatus(const v1::ControllerStatus& status, absl::string_view address, View view);
std::string RenderWorkers(const v1::ListWorkersResponse& workers, View view);
std::string RenderLayers(const v1::ListLayersResponse& layers, View view);
std::string RenderPolicy(const v1::PolicySettings& policy, View view);
std::string RenderPolicyChange(const v1::SetPolicyResponse& change, View view);

std::string RenderPlanList(const v1::ListPlansResponse& plans, View view);
// One line of `plans watch`.
std::string RenderPlanLine(const v1::PlanRecord& record, View view);

std::string RenderPlan(const PlanRecord& record, View view);   // plans show
std::string ExplainPlan(const PlanRecord& record, View view);  // plans explain
std::string DiffPlans(const PlanRecord& before, const PlanRecord& after, View view);

}  // namespace lrmoe::ctl
