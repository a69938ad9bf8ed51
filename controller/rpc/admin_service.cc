#include "controller/rpc/admin_service.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "controller/rpc/admin_answers.h"
#include "controller/rpc/status.h"
#include "proto/convert.h"
#include "proto/range.h"

namespace lrmoe::rpc {
namespace {

grpc::Status Stopping() {
  return ToGrpc(absl::UnavailableError("the controller is stopping"));
}

// Answers a unary call from the loop. `fill` returns the call's status.
template <typename Fill>
grpc::ServerUnaryReactor* Answer(Server* server, grpc::CallbackServerContext* context, Fill fill) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  server->Ask([reactor, fill](const Server::View& view) { reactor->Finish(ToGrpc(fill(view))); },
              [reactor] { reactor->Finish(Stopping()); });
  return reactor;
}

// Sends every plan of a layer, or of all; a reader that falls behind is told so and dropped.
class WatchReactor final : public grpc::ServerWriteReactor<v1::PlanRecord>,
                           public PlanWatcher,
                           public std::enable_shared_from_this<WatchReactor> {
 public:
  WatchReactor(Server* server, std::optional<int32_t> layer) : server_(server), layer_(layer) {}

  void Begin() {
    self_ = shared_from_this();
    server_->Watch(self_);
    std::lock_guard lock(mutex_);
    StartSendInitialMetadata();  // so that a client knows it watches before the first plan
  }

  void OnPlan(const core::PlanRecord& record) override {
    if (layer_.has_value() && record.plan->plan.invocation.layer != *layer_) return;
    auto message = std::make_unique<v1::PlanRecord>();
    FillRecord(record, false, message.get());
    std::lock_guard lock(mutex_);
    if (closing_.has_value()) return;
    if (outgoing_.size() >= kMaxOutgoing) {
      closing_ = absl::ResourceExhaustedError(
          absl::StrCat("this client reads too slowly: ", kMaxOutgoing, " plans wait for it"));
    } else {
      outgoing_.push_back(std::move(message));
    }
    Continue();
  }

  void OnEnd(const absl::Status& status) override { Close(status); }

  void OnSendInitialMetadataDone(bool) override {
    std::lock_guard lock(mutex_);
    ready_ = true;
    Continue();
  }
  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    outgoing_.pop_front();
    if (!ok) outgoing_.clear();
    Continue();
  }
  void OnCancel() override { Close(absl::CancelledError("cancelled by the client")); }
  void OnDone() override {
    server_->Unwatch(self_);
    self_.reset();
  }

 private:
  static constexpr size_t kMaxOutgoing = 1024;

  void Close(const absl::Status& status) {
    std::lock_guard lock(mutex_);
    if (closing_.has_value()) return;
    closing_ = status;
    Continue();
  }

  // Needs mutex_.
  void Continue() {
    if (!ready_ || writing_ || finished_) return;
    if (!outgoing_.empty()) {
      writing_ = true;
      StartWrite(outgoing_.front().get());
    } else if (closing_.has_value()) {
      finished_ = true;
      Finish(ToGrpc(*closing_));
    }
  }

  Server* const server_;
  const std::optional<int32_t> layer_;
  std::shared_ptr<WatchReactor> self_;  // until OnDone

  std::mutex mutex_;
  std::deque<std::unique_ptr<v1::PlanRecord>> outgoing_;
  std::optional<absl::Status> closing_;
  bool ready_ = false;
  bool writing_ = false;
  bool finished_ = false;
};

// A stream that is refused before it starts.
class RefusedWatch final : public grpc::ServerWriteReactor<v1::PlanRecord> {
 public:
  explicit RefusedWatch(const absl::Status& status) { Finish(ToGrpc(status)); }
  void OnDone() override { delete this; }
};

}  // namespace

grpc::ServerUnaryReactor* AdminService::GetStatus(grpc::CallbackServerContext* context,
                                                  const v1::GetStatusRequest*,
                                                  v1::ControllerStatus* response) {
  return Answer(server_, context, [response](const Server::View& view) {
    FillStatus(view, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::ListWorkers(grpc::CallbackServerContext* context,
                                                    const v1::ListWorkersRequest*,
                                                    v1::ListWorkersResponse* response) {
  return Answer(server_, context, [response](const Server::View& view) {
    FillWorkers(view, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::ListLayers(grpc::CallbackServerContext* context,
                                                   const v1::ListLayersRequest*,
                                                   v1::ListLayersResponse* response) {
  return Answer(server_, context, [response](const Server::View& view) {
    FillLayers(view, response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::ListPlans(grpc::CallbackServerContext* context,
                                                  const v1::ListPlansRequest* request,
                                                  v1::ListPlansResponse* response) {
  return Answer(server_, context, [request, response](const Server::View& view) {
    return FillPlans(view, *request, response);
  });
}

grpc::ServerUnaryReactor* AdminService::GetPlan(grpc::CallbackServerContext* context,
                                                const v1::GetPlanRequest* request, v1::PlanRecord* response) {
  return Answer(server_, context,
                [request, response](const Server::View& view) { return FillPlan(view, *request, response); });
}

grpc::ServerWriteReactor<v1::PlanRecord>* AdminService::WatchPlans(grpc::CallbackServerContext*,
                                                                   const v1::WatchPlansRequest* request) {
  std::optional<int32_t> layer;
  if (request->has_layer()) {
    if (request->layer() < 0 || request->layer() >= kMaxLayers)
      return new RefusedWatch(absl::InvalidArgumentError(
          absl::StrCat("layer is ", request->layer(), "; allowed: 0..", kMaxLayers - 1)));
    layer = request->layer();
  }
  auto reactor = std::make_shared<WatchReactor>(server_, layer);
  reactor->Begin();
  return reactor.get();
}

grpc::ServerUnaryReactor* AdminService::GetPolicy(grpc::CallbackServerContext* context,
                                                  const v1::GetPolicyRequest*, v1::PolicySettings* response) {
  return Answer(server_, context, [response](const Server::View& view) {
    ToWire(view.core.newest_policy(), response);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* AdminService::SetPolicy(grpc::CallbackServerContext* context,
                                                  const v1::SetPolicyRequest* request,
                                                  v1::SetPolicyResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  // Against the defaults, for the fields' own sake; the loop applies them to the policy in force.
  const absl::Status valid = request->policy().fields().empty()
                                 ? absl::InvalidArgumentError("policy has no fields; allowed: at least one")
                                 : ApplyWire(Policy{}, request->policy()).status();
  if (!valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  std::vector<std::pair<std::string, std::string>> fields;
  for (const v1::PolicySettings::Field& field : request->policy().fields())
    fields.emplace_back(field.name(), field.value());
  server_->SetPolicy(std::move(fields), [reactor, response](absl::StatusOr<PolicyChange> change) {
    if (change.ok()) {
      ToWire(change->policy, response->mutable_policy());
      response->set_from_step(change->from_step);
    }
    reactor->Finish(ToGrpc(change.status()));
  });
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::SimulatePlan(grpc::CallbackServerContext* context,
                                                     const v1::SimulatePlanRequest* request,
                                                     v1::SimulatePlanResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const auto answer = [request, response, reactor, server = server_](const Server::View& view) {
    absl::StatusOr<planner::PlanningProblem> problem = WhatIfOf(view, *request, response->mutable_recorded());
    if (!problem.ok()) {
      reactor->Finish(ToGrpc(problem.status()));
      return;
    }
    server->Simulate(*std::move(problem), [response, reactor](const absl::StatusOr<LayerPlan>& plan) {
      if (plan.ok()) {
        ToWire(*plan, response->mutable_simulated());
        *response->mutable_simulated()->mutable_invocation() = response->recorded().plan().invocation();
      }
      reactor->Finish(ToGrpc(plan.status()));
    });
  };
  server_->Ask(answer, [reactor] { reactor->Finish(Stopping()); });
  return reactor;
}

grpc::ServerUnaryReactor* AdminService::Drain(grpc::CallbackServerContext* context,
                                              const v1::DrainRequest* request, v1::DrainResponse* response) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  if (absl::Status valid = wire::Text("reason", request->reason(), 0, 1024); !valid.ok()) {
    reactor->Finish(ToGrpc(valid));
    return reactor;
  }
  // Posted first, so that the ranks counted are those that were asked.
  server_->Post(core::DrainRequested{request->reason()});
  server_->Ask(
      [reactor, response](const Server::View& view) {
        const auto& members = view.core.members();
        response->set_ranks(static_cast<int32_t>(std::count_if(
            members.begin(), members.end(),
            [](const core::Member& member) { return member.state == core::MemberState::kConnected; })));
        reactor->Finish(grpc::Status::OK);
      },
      [reactor] { reactor->Finish(Stopping()); });
  return reactor;
}

}  // namespace lrmoe::rpc
