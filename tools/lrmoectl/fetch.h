// What several commands ask of the controller before they print. Errors as in client.h.
#pragma once

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "lrmoe/v1/admin.pb.h"
#include "tools/lrmoectl/client.h"
#include "tools/lrmoectl/options.h"
#include "tools/lrmoectl/plan_record.h"
#include "tools/lrmoectl/render.h"

namespace lrmoe::ctl {

View ViewOf(const Options& options, const Console& console);
AdminClient Connect(const Options& options);

// FailedPrecondition when no plan was made of it, Internal when the controller sent something that is no
// plan.
absl::StatusOr<PlanRecord> ParseRecord(AdminClient& client, const v1::PlanRecord& wire);
absl::StatusOr<PlanRecord> FetchPlan(AdminClient& client, const Invocation& invocation, bool latest);
// The one that --step, --layer, --micro-batch and --latest choose.
absl::StatusOr<PlanRecord> FetchPlan(AdminClient& client, const Options& options);
v1::GetPlanRequest PlanRequest(const Invocation& invocation, bool latest);
Invocation ChosenInvocation(const Options& options);

// Follows pages until `limit` plans are there or the list ends; next_page_token continues after the last one.
absl::StatusOr<v1::ListPlansResponse> FetchPlans(AdminClient& client, const PlanFilter& filter);

}  // namespace lrmoe::ctl
