#include "tools/lrmoectl/fetch.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "proto/convert.h"

namespace lrmoe::ctl {
namespace {

constexpr int64_t kMaxPageSize = 1000;  // of ListPlansRequest

}  // namespace

View ViewOf(const Options& options, const Console& console) {
  return {.json = options.output == "json", .colour = console.colour};
}

AdminClient Connect(const Options& options) {
  return AdminClient(options.controller, options.timeout);
}

v1::GetPlanRequest PlanRequest(const Invocation& invocation, bool latest) {
  v1::GetPlanRequest request;
  request.mutable_invocation()->set_step(invocation.step);
  request.mutable_invocation()->set_layer(invocation.layer);
  request.mutable_invocation()->set_micro_batch(invocation.micro_batch);
  request.set_latest(latest);
  return request;
}

Invocation ChosenInvocation(const Options& options) {
  return {options.step.value_or(0), static_cast<int32_t>(options.layer),
          static_cast<int32_t>(options.micro_batch)};
}

absl::StatusOr<PlanRecord> ParseRecord(AdminClient& client, const v1::PlanRecord& wire) {
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

absl::StatusOr<PlanRecord> FetchPlan(AdminClient& client, const Invocation& invocation, bool latest) {
  LRMOE_ASSIGN_OR_RETURN(const v1::PlanRecord wire, client.GetPlan(PlanRequest(invocation, latest)));
  return ParseRecord(client, wire);
}

absl::StatusOr<PlanRecord> FetchPlan(AdminClient& client, const Options& options) {
  return FetchPlan(client, ChosenInvocation(options), options.latest);
}

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

}  // namespace lrmoe::ctl
