// The admin service: what lrmoectl asks. Every answer is put together on the loop thread, so it is one
// moment's truth.
#pragma once

#include "controller/server.h"
#include "lrmoe/v1/admin.grpc.pb.h"

namespace lrmoe::rpc {

class AdminService final : public v1::Admin::CallbackService {
 public:
  // `server` outlives the service and every call.
  explicit AdminService(Server* server) : server_(server) {}

  grpc::ServerUnaryReactor* GetStatus(grpc::CallbackServerContext* context,
                                      const v1::GetStatusRequest* request,
                                      v1::ControllerStatus* response) override;
  grpc::ServerUnaryReactor* ListWorkers(grpc::CallbackServerContext* context,
                                        const v1::ListWorkersRequest* request,
                                        v1::ListWorkersResponse* response) override;
  grpc::ServerUnaryReactor* ListLayers(grpc::CallbackServerContext* context,
                                       const v1::ListLayersRequest* request,
                                       v1::ListLayersResponse* response) override;
  grpc::ServerUnaryReactor* ListPlans(grpc::CallbackServerContext* context,
                                      const v1::ListPlansRequest* request,
                                      v1::ListPlansResponse* response) override;
  grpc::ServerUnaryReactor* GetPlan(grpc::CallbackServerContext* context, const v1::GetPlanRequest* request,
                                    v1::PlanRecord* response) override;
  grpc::ServerWriteReactor<v1::PlanRecord>* WatchPlans(grpc::CallbackServerContext* context,
                                                       const v1::WatchPlansRequest* request) override;
  grpc::ServerUnaryReactor* GetPolicy(grpc::CallbackServerContext* context,
                                      const v1::GetPolicyRequest* request,
                                      v1::PolicySettings* response) override;
  grpc::ServerUnaryReactor* SetPolicy(grpc::CallbackServerContext* context,
                                      const v1::SetPolicyRequest* request,
                                      v1::SetPolicyResponse* response) override;
  grpc::ServerUnaryReactor* SimulatePlan(grpc::CallbackServerContext* context,
                                         const v1::SimulatePlanRequest* request,
                                         v1::SimulatePlanResponse* response) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest* request,
                                  v1::DrainResponse* response) override;

 private:
  Server* const server_;
};

}  // namespace lrmoe::rpc
