// The operations of the engine as the worker protocol offers them: check, queue, run, reply.
#include <memory>
#include <type_traits>
#include <utility>

#include "common/status_macros.h"
#include "proto/convert.h"
#include "worker/rpc/grpc_status.h"
#include "worker/rpc/request_check.h"
#include "worker/rpc/worker_service.h"

namespace lrmoe::worker {
namespace {

using engine::Operation;

// As the client gave it, valid or not: for errors and for taking part in the agreement.
Invocation Named(const v1::Invocation& wire) {
  return {.step = wire.step(), .layer = wire.layer(), .micro_batch = wire.micro_batch()};
}

Invocation NamedLayer(int32_t layer) {
  return {.step = 0, .layer = layer, .micro_batch = 0};
}

// The result of a check that has nothing to hand on.
struct Nothing {};
absl::StatusOr<Nothing> NothingToCheck(const Session&) {
  return Nothing{};
}

absl::StatusOr<Nothing> Checked(const absl::Status& status) {
  if (!status.ok()) return status;
  return Nothing{};
}

// gRPC frees a reactor once it has finished.
WorkerService::Reply ReplyOf(grpc::ServerUnaryReactor* reactor) {
  return [reactor](const absl::Status& status) { reactor->Finish(ToGrpc(status)); };
}

// `run` between the client's event and the worker's, when the call names device memory.
template <typename Call, typename Run>
auto InOrder(EnginePort& engine, Operation operation, const Call& call, std::chrono::milliseconds limit,
             const Run& run) -> decltype(run()) {
  if (call.events == nullptr) return run();
  if (const absl::Status status = call.events->client->Await(limit); !status.ok())
    return engine.Refuse(operation, call.args.invocation, status);
  auto result = run();
  if (result.ok()) LRMOE_RETURN_IF_ERROR(call.events->worker->Record());
  return result;
}

uint64_t Number(ParameterVersion version) {
  return static_cast<uint64_t>(version);
}

}  // namespace

void WorkerService::PostReply(Reply reply, std::function<absl::Status(EnginePort&)> run) {
  const absl::Status posted = engine_thread_.Post(
      {.run = [run = std::move(run)](EngineSlot& slot) { return run(*slot.engine); }, .done = reply});
  if (!posted.ok()) reply(posted);
}

template <typename Check, typename Run>
void WorkerService::Collective(Reply reply, const Wanted& wanted, const Check& check, Run run) {
  const auto found = FindSession(wanted.session);
  if (!found.ok()) return reply(found.status());
  auto call = check(**found);
  if (!call.ok()) {
    PostReply(std::move(reply), [wanted, reason = call.status()](EnginePort& engine) {
      return engine.Refuse(wanted.operation, wanted.named, reason);
    });
  } else {
    PostReply(std::move(reply),
              [run, call = *std::move(call)](EnginePort& engine) { return run(engine, call); });
  }
}

template <typename Check, typename Run>
grpc::ServerUnaryReactor* WorkerService::Collective(Context* context, uint64_t session, Operation operation,
                                                    const Invocation& named, const Check& check, Run run) {
  Reactor* reactor = context->DefaultReactor();
  Collective(ReplyOf(reactor), {session, operation, named}, check, std::move(run));
  return reactor;
}

template <typename Check, typename Run>
grpc::ServerUnaryReactor* WorkerService::Local(Context* context, uint64_t session, const Check& check,
                                               Run run) {
  Reactor* reactor = context->DefaultReactor();
  const auto found = FindSession(session);
  if (!found.ok()) {
    reactor->Finish(ToGrpc(found.status()));
    return reactor;
  }
  auto call = check(**found);
  if (!call.ok()) {
    reactor->Finish(ToGrpc(call.status()));
  } else {
    PostReply(ReplyOf(reactor),
              [run, call = *std::move(call)](EnginePort& engine) { return run(engine, call); });
  }
  return reactor;
}

grpc::ServerUnaryReactor* WorkerService::LoadExpert(Context* context, const v1::LoadExpertRequest* request,
                                                    v1::LoadExpertResponse*) {
  return Local(
      context, request->session(),
      [request](const Session& s) { return CheckLoadExpert(*request, s.model, s.arenas); },
      [](EnginePort& engine, const LoadExpertCall& call) {
        return engine.LoadExpert(call.layer, call.expert_idx, call.type, call.w1, call.w2);
      });
}

grpc::ServerUnaryReactor* WorkerService::ExportExpert(Context* context,
                                                      const v1::ExportExpertRequest* request,
                                                      v1::ExportExpertResponse* response) {
  return Local(
      context, request->session(),
      [request](const Session& s) { return CheckExportExpert(*request, s.model, s.arenas); },
      [response](EnginePort& engine, const ExportExpertCall& call) {
        LRMOE_RETURN_IF_ERROR(
            engine.ExportExpert(call.layer, call.expert_idx, call.content, call.w1, call.w2));
        response->set_parameter_version(Number(engine.version(call.layer)));
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* WorkerService::FinishLoad(Context* context, const v1::FinishLoadRequest* request,
                                                    v1::FinishLoadResponse* response) {
  const int32_t layer = request->layer();
  return Collective(
      context, request->session(), Operation::kFinishLoad, NamedLayer(layer),
      [layer](const Session& s) { return Checked(CheckLayer(layer, s.model)); },
      [layer, response](EnginePort& engine, Nothing) {
        LRMOE_RETURN_IF_ERROR(engine.FinishLoad(layer));
        response->set_parameter_version(Number(engine.version(layer)));
        return absl::OkStatus();
      });
}

void WorkerService::RememberPlan(const ExecutionPlan& execution, bool needs_backward,
                                 v1::InvocationSummary* summary) {
  const LayerPlan& plan = execution.plan;
  summary->set_retention_rate(plan.retention_rate);
  summary->mutable_imbalance()->set_before(plan.imbalance.before);
  summary->mutable_imbalance()->set_forward(plan.imbalance.forward);
  summary->mutable_imbalance()->set_backward(plan.imbalance.backward);
  int64_t kept = 0, routed = 0;
  for (int64_t quota : plan.quota) kept += quota;
  for (const RankPlan& rank : plan.ranks) routed += rank.forward_rows;
  summary->set_planned_kept_rows(kept);
  summary->set_planned_routed_rows(routed);
  summary->set_new_replicas(plan.new_replicas);
  summary->set_plan_us(plan.plan_us);
  summary->set_policy(plan.policy);
  // As in the engine: a forward of a later step frees the contexts of earlier steps of its layer.
  const Invocation& now = plan.invocation;
  std::erase_if(planned_, [&now](const auto& entry) {
    return entry.first.layer == now.layer && entry.first.step < now.step;
  });
  if (needs_backward) planned_[now] = *summary;
}

void WorkerService::RunForward(const v1::ForwardRequest* request, v1::ForwardResponse* response,
                               Reply reply) {
  Collective(
      std::move(reply), {request->session(), Operation::kForward, Named(request->invocation())},
      [request](const Session& s) { return CheckForward(*request, s.model, s.arenas, s.device); },
      [this, response](EnginePort& engine, const ForwardCall& call) {
        LRMOE_ASSIGN_OR_RETURN(const engine::ForwardResult result,
                               InOrder(engine, Operation::kForward, call, options_.event_timeout,
                                       [&] { return engine.Forward(call.args); }));
        RememberPlan(result.plan, call.args.needs_backward, response->mutable_summary());
        ToWire(result.report, response->mutable_summary()->mutable_report());
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* WorkerService::Forward(Context* context, const v1::ForwardRequest* request,
                                                 v1::ForwardResponse* response) {
  Reactor* reactor = context->DefaultReactor();
  RunForward(request, response, ReplyOf(reactor));
  return reactor;
}

void WorkerService::RunBackward(const v1::BackwardRequest* request, v1::BackwardResponse* response,
                                Reply reply) {
  Collective(
      std::move(reply), {request->session(), Operation::kBackward, Named(request->invocation())},
      [request](const Session& s) { return CheckBackward(*request, s.model, s.arenas, s.device); },
      [this, response](EnginePort& engine, const BackwardCall& call) {
        const auto planned = planned_.extract(call.args.invocation);  // the context is freed, also on error
        LRMOE_ASSIGN_OR_RETURN(const engine::BackwardResult result,
                               InOrder(engine, Operation::kBackward, call, options_.event_timeout,
                                       [&] { return engine.Backward(call.args); }));
        if (planned) *response->mutable_summary() = planned.mapped();
        ToWire(result.report, response->mutable_summary()->mutable_report());
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* WorkerService::Backward(Context* context, const v1::BackwardRequest* request,
                                                  v1::BackwardResponse* response) {
  Reactor* reactor = context->DefaultReactor();
  RunBackward(request, response, ReplyOf(reactor));
  return reactor;
}

grpc::ServerUnaryReactor* WorkerService::Discard(Context* context, const v1::DiscardRequest* request,
                                                 v1::DiscardResponse*) {
  return Collective(
      context, request->session(), Operation::kDiscard, Named(request->invocation()),
      [request](const Session& s) { return CheckInvocation(request->invocation(), s.model); },
      [this](EnginePort& engine, const Invocation& invocation) {
        planned_.erase(invocation);
        return engine.Discard(invocation);
      });
}

grpc::ServerUnaryReactor* WorkerService::OptimizerStep(Context* context,
                                                       const v1::OptimizerStepRequest* request,
                                                       v1::OptimizerStepResponse* response) {
  return Collective(
      context, request->session(), Operation::kOptimizerStep, Invocation{.step = request->step()},
      [request](const Session&) { return CheckOptimizerStep(*request); },
      [response](EnginePort& engine, const engine::AdamWStep& step) {
        LRMOE_RETURN_IF_ERROR(engine.OptimizerStep(step));
        response->set_parameter_version(Number(engine.version(0)));
        return absl::OkStatus();
      });
}

grpc::ServerUnaryReactor* WorkerService::GradientNorm(Context* context,
                                                      const v1::GradientNormRequest* request,
                                                      v1::GradientNormResponse* response) {
  return Collective(context, request->session(), Operation::kGradientNorm, Invocation{}, NothingToCheck,
                    [response](EnginePort& engine, Nothing) {
                      LRMOE_ASSIGN_OR_RETURN(const double norm, engine.SquaredGradientNorm());
                      response->set_squared_norm(norm);
                      return absl::OkStatus();
                    });
}

grpc::ServerUnaryReactor* WorkerService::ZeroGradients(Context* context,
                                                       const v1::ZeroGradientsRequest* request,
                                                       v1::ZeroGradientsResponse*) {
  return Collective(context, request->session(), Operation::kZeroGradients, Invocation{}, NothingToCheck,
                    [](EnginePort& engine, Nothing) { return engine.ZeroGradients(); });
}

grpc::ServerUnaryReactor* WorkerService::SaveCheckpoint(Context* context,
                                                        const v1::SaveCheckpointRequest* request,
                                                        v1::SaveCheckpointResponse*) {
  const int64_t step = request->step();
  return Collective(
      context, request->session(), Operation::kSaveCheckpoint, Invocation{.step = step},
      [request](const Session&) -> absl::StatusOr<std::string> {
        LRMOE_RETURN_IF_ERROR(CheckDirectory(request->directory()));
        LRMOE_RETURN_IF_ERROR(CheckCheckpointStep(request->step()));
        return request->directory();
      },
      [step](EnginePort& engine, const std::string& directory) {
        return engine.SaveCheckpoint(directory, step);
      });
}

grpc::ServerUnaryReactor* WorkerService::LoadCheckpoint(Context* context,
                                                        const v1::LoadCheckpointRequest* request,
                                                        v1::LoadCheckpointResponse* response) {
  const int64_t step = request->step();
  return Collective(
      context, request->session(), Operation::kLoadCheckpoint, Invocation{.step = step},
      [request](const Session&) -> absl::StatusOr<std::string> {
        LRMOE_RETURN_IF_ERROR(CheckDirectory(request->directory()));
        return request->directory();
      },
      [this, step, response](EnginePort& engine, const std::string& directory) {
        LRMOE_ASSIGN_OR_RETURN(const int64_t loaded, engine.LoadCheckpoint(directory, step));
        planned_.clear();
        response->set_step(loaded);
        response->set_optimizer_step(engine.optimizer_step());
        return absl::OkStatus();
      });
}

}  // namespace lrmoe::worker
