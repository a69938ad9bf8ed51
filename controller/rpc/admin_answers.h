// Puts what the loop knows into the messages of the admin API. Called on the loop thread.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "controller/server.h"
#include "lrmoe/v1/admin.pb.h"

namespace lrmoe::rpc {

void FillStatus(const Server::View& view, v1::ControllerStatus* out);
void FillWorkers(const Server::View& view, v1::ListWorkersResponse* out);
void FillLayers(const Server::View& view, v1::ListLayersResponse* out);
// InvalidArgument for a bad filter or page token.
absl::Status FillPlans(const Server::View& view, const v1::ListPlansRequest& request,
                       v1::ListPlansResponse* out);
// NotFound says what is kept.
absl::Status FillPlan(const Server::View& view, const v1::GetPlanRequest& request, v1::PlanRecord* out);

// The problem that a what-if asks about; `recorded` gets the plan that was made. InvalidArgument names the
// field; FailedPrecondition and NotFound say what is missing.
absl::StatusOr<planner::PlanningProblem> WhatIfOf(const Server::View& view,
                                                  const v1::SimulatePlanRequest& request,
                                                  v1::PlanRecord* recorded);

// A whole record, or without instances, rejected candidates and reports.
void FillRecord(const core::PlanRecord& record, bool whole, v1::PlanRecord* out);

}  // namespace lrmoe::rpc
