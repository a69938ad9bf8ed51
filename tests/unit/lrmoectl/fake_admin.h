// An Admin service in this process with a story that never changes, on a port of its own.
#pragma once

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <memory>
#include <string>
#include <vector>

#include "common/plan.h"
#include "common/policy.h"
#include "lrmoe/v1/admin.grpc.pb.h"

namespace lrmoe::ctl {

// 200 rows of 4 experts on 2 ranks; expert 0 is too popular and has a replica; two candidates were rejected.
LayerPlan SamplePlan(const Invocation& invocation);

class FakeAdmin final : public v1::Admin::Service {
 public:
  FakeAdmin();
  ~FakeAdmin() override;

  const std::string& address() const { return address_; }
  // What ListPlans is misled into, to see that the client does not follow.
  enum class Pages { kHonest, kEndless, kTooLong };
  void set_pages(Pages pages) { pages_ = pages; }
  // WatchPlans ends the stream after the story, instead of staying silent.
  void set_ends_stream(bool ends) { ends_stream_ = ends; }
  // GetStatus waits for the client to give up.
  void set_silent(bool silent) { silent_ = silent; }
  // GetPlan answers a plan that contradicts itself.
  void set_lies(bool lies) { lies_ = lies; }
  // The last request of each.
  v1::SimulatePlanRequest simulated() const { return simulated_; }
  std::string drained() const { return drained_; }
  int num_list_calls() const { return num_list_calls_; }

 private:
  using Context = grpc::ServerContext;
  grpc::Status GetStatus(Context*, const v1::GetStatusRequest*, v1::ControllerStatus*) override;
  grpc::Status ListWorkers(Context*, const v1::ListWorkersRequest*, v1::ListWorkersResponse*) override;
  grpc::Status ListLayers(Context*, const v1::ListLayersRequest*, v1::ListLayersResponse*) override;
  grpc::Status ListPlans(Context*, const v1::ListPlansRequest*, v1::ListPlansResponse*) override;
  grpc::Status GetPlan(Context*, const v1::GetPlanRequest*, v1::PlanRecord*) override;
  grpc::Status WatchPlans(Context*, const v1::WatchPlansRequest*,
                          grpc::ServerWriter<v1::PlanRecord>*) override;
  grpc::Status GetPolicy(Context*, const v1::GetPolicyRequest*, v1::PolicySettings*) override;
  grpc::Status SetPolicy(Context*, const v1::SetPolicyRequest*, v1::SetPolicyResponse*) override;
  grpc::Status SimulatePlan(Context*, const v1::SimulatePlanRequest*, v1::SimulatePlanResponse*) override;
  grpc::Status Drain(Context*, const v1::DrainRequest*, v1::DrainResponse*) override;

  v1::SimulatePlanRequest simulated_;  // written before, read after a call
  std::string drained_;
  Policy policy_;
  std::atomic<Pages> pages_ = Pages::kHonest;
  std::atomic<bool> ends_stream_ = false, silent_ = false, lies_ = false;
  std::atomic<int> num_list_calls_ = 0;
  std::vector<v1::PlanRecord> history_;  // oldest first
  std::string address_;
  std::unique_ptr<grpc::Server> server_;
};

}  // namespace lrmoe::ctl
