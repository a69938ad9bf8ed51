// The admin API of one controller. Every call has a deadline; errors say what to look at.
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "lrmoe/v1/admin.pb.h"

namespace lrmoe::ctl {

// "host:port" with a port from 1 to 65535, "[::1]:7070" or "unix:/path"; else InvalidArgument.
absl::Status ValidateAddress(absl::string_view address);

// Not thread safe. A call fails with Unavailable "controller at ADDRESS is not reachable: ..." when there is
// no connection, DeadlineExceeded when it is connected but silent, else with the controller's own status.
class AdminClient {
 public:
  // `address` has been validated. Does not connect yet.
  AdminClient(std::string address, std::chrono::milliseconds timeout);
  ~AdminClient();

  const std::string& address() const { return address_; }

  absl::StatusOr<v1::ControllerStatus> GetStatus();
  absl::StatusOr<v1::ListWorkersResponse> ListWorkers();
  absl::StatusOr<v1::ListLayersResponse> ListLayers();
  absl::StatusOr<v1::ListPlansResponse> ListPlans(const v1::ListPlansRequest& request);
  absl::StatusOr<v1::PlanRecord> GetPlan(const v1::GetPlanRequest& request);
  absl::StatusOr<v1::PolicySettings> GetPolicy();
  absl::StatusOr<v1::SetPolicyResponse> SetPolicy(const v1::SetPolicyRequest& request);
  absl::StatusOr<v1::SimulatePlanResponse> SimulatePlan(const v1::SimulatePlanRequest& request);
  absl::StatusOr<v1::DrainResponse> Drain(const v1::DrainRequest& request);

  // Calls `on_plan` for each plan as it is made until it returns false, `limit` has passed (both end with
  // OK), or the stream breaks.
  absl::Status WatchPlans(const v1::WatchPlansRequest& request,
                          std::optional<std::chrono::milliseconds> limit,
                          const std::function<bool(const v1::PlanRecord&)>& on_plan);

 private:
  struct Connection;
  const std::string address_;
  const std::chrono::milliseconds timeout_;
  const std::unique_ptr<Connection> connection_;
};

}  // namespace lrmoe::ctl
