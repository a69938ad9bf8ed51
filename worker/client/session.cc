#include "worker/client/session.h"

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <condition_variable>
#include <initializer_list>
#include <mutex>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "lrmoe/v1/worker.grpc.pb.h"
#include "proto/convert.h"
#include "worker/client/mapped_arena.h"

namespace lrmoe::client {
namespace {

absl::Status FromGrpc(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

v1::DataType WireType(DataType type) {
  return type == DataType::kBf16 ? v1::DATA_TYPE_BF16 : v1::DATA_TYPE_FP32;
}

absl::StatusOr<InvocationSummary> SummaryFromWire(const v1::InvocationSummary& wire) {
  InvocationSummary summary;
  summary.retention_rate = wire.retention_rate();
  summary.imbalance = {wire.imbalance().before(), wire.imbalance().forward(), wire.imbalance().backward()};
  summary.planned_kept_rows = wire.planned_kept_rows();
  summary.planned_routed_rows = wire.planned_routed_rows();
  summary.new_replicas = wire.new_replicas();
  summary.plan_us = wire.plan_us();
  summary.policy = wire.policy();
  LRMOE_ASSIGN_OR_RETURN(summary.report, FromWire(wire.report()));
  return summary;
}

// The Attach call, read by a thread of its own for as long as the session lives.
class AttachCall {
 public:
  AttachCall(v1::Worker::Stub* stub, const v1::AttachRequest& request)
      : reader_(stub->Attach(&context_, request)) {
    thread_ = std::thread([this] { Read(); });
  }
  ~AttachCall() {
    context_.TryCancel();
    thread_.join();
  }

  absl::StatusOr<v1::Attached> Wait(std::chrono::milliseconds limit) {
    std::unique_lock lock(mutex_);
    if (!changed_.wait_for(lock, limit, [this] { return attached_ || !over_.ok(); })) {
      return absl::DeadlineExceededError(absl::StrCat("the worker did not attach this client within ",
                                                      limit.count(),
                                                      " ms; it waits for every rank's framework"));
    }
    if (!attached_) return over_;
    return event_;
  }

  absl::Status over() const {
    std::lock_guard lock(mutex_);
    return over_;
  }

 private:
  void Read() {
    v1::SessionEvent event;
    std::string reason;
    while (reader_->Read(&event)) {
      if (event.has_ended()) reason = event.ended().reason();
      if (!event.has_attached()) continue;
      std::lock_guard lock(mutex_);
      attached_ = true;
      event_ = event.attached();
      changed_.notify_all();
    }
    absl::Status status = FromGrpc(reader_->Finish());
    if (!reason.empty()) status = absl::UnavailableError(reason);
    if (status.ok()) status = absl::UnavailableError("the worker ended the session");
    std::lock_guard lock(mutex_);
    over_ = status;
    changed_.notify_all();
  }

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::SessionEvent>> reader_;
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool attached_ = false;  // guarded by mutex_
  v1::Attached event_;     // guarded by mutex_
  absl::Status over_;      // guarded by mutex_; not OK once the call is over
  std::thread thread_;
};

class RemoteSession final : public Session {
 public:
  RemoteSession(const Options& options, std::shared_ptr<grpc::Channel> channel)
      : options_(options), stub_(v1::Worker::NewStub(std::move(channel))) {}

  ~RemoteSession() override {
    if (session_ == 0 || !health().ok()) return;
    v1::DetachRequest request;
    v1::DetachResponse response;
    (void)Call(&v1::Worker::Stub::Detach, request,
               &response);  // the end of the Attach call frees the session anyway
  }

  absl::Status Open() {
    v1::AttachRequest request;
    request.set_protocol_version(kProtocolVersion);
    request.set_client(options_.name);
    request.set_expected_world_size(options_.expected_world_size);
    ToWire(options_.model, request.mutable_model());
    call_ = std::make_unique<AttachCall>(stub_.get(), request);
    LRMOE_ASSIGN_OR_RETURN(const v1::Attached attached, call_->Wait(options_.call_timeout));
    session_ = attached.session();
    rank_ = attached.rank();
    world_size_ = attached.world_size();
    owned_.assign(attached.owned_experts().begin(), attached.owned_experts().end());
    return absl::OkStatus();
  }

  int32_t rank() const override { return rank_; }
  int32_t world_size() const override { return world_size_; }
  const std::vector<int32_t>& owned_experts() const override { return owned_; }
  absl::Status health() const override { return call_->over(); }

  absl::StatusOr<std::unique_ptr<Arena>> CreateArena(int64_t bytes) override {
    v1::CreateArenaRequest request;
    request.set_bytes(bytes);
    v1::Arena arena;
    LRMOE_RETURN_IF_ERROR(Call(&v1::Worker::Stub::CreateArena, request, &arena));
    LRMOE_ASSIGN_OR_RETURN(auto mapped, MappedArena::Map(arena, [this](uint64_t id) { Release(id); }));
    arenas_.Add(arena.arena(), mapped->memory());
    return mapped;
  }

  absl::Status LoadExpert(int32_t layer, int32_t expert_idx, DataType type,
                          std::span<const std::byte> gate_up, std::span<const std::byte> down) override {
    v1::LoadExpertRequest request;
    request.set_layer(layer);
    request.set_expert(expert_idx);
    const LayerShape& shape = options_.model.shape;
    LRMOE_RETURN_IF_ERROR(Describe("gate_up", gate_up, WireType(type), {shape.fc1_width(), shape.hidden_size},
                                   request.mutable_gate_up()));
    LRMOE_RETURN_IF_ERROR(Describe("down", down, WireType(type), {shape.hidden_size, shape.intermediate_size},
                                   request.mutable_down()));
    v1::LoadExpertResponse response;
    return Call(&v1::Worker::Stub::LoadExpert, request, &response);
  }

  absl::StatusOr<ParameterVersion> FinishLoad(int32_t layer) override {
    v1::FinishLoadRequest request;
    request.set_layer(layer);
    v1::FinishLoadResponse response;
    LRMOE_RETURN_IF_ERROR(Call(&v1::Worker::Stub::FinishLoad, request, &response));
    return ParameterVersion{response.parameter_version()};
  }

  absl::Status ReadWeights(int32_t layer, int32_t expert_idx, std::span<float> gate_up,
                           std::span<float> down) override {
    return Export(layer, expert_idx, v1::EXPERT_CONTENT_WEIGHTS, gate_up, down);
  }
  absl::Status ReadGradients(int32_t layer, int32_t expert_idx, std::span<float> gate_up,
                             std::span<float> down) override {
    return Export(layer, expert_idx, v1::EXPERT_CONTENT_GRADIENT, gate_up, down);
  }

  absl::StatusOr<InvocationSummary> Forward(const Invocation& invocation,
                                            const ForwardTensors& tensors) override {
    v1::ForwardRequest request;
    ToWire(invocation, request.mutable_invocation());
    const int64_t t = tensors.num_tokens, h = options_.model.shape.hidden_size,
                  k = options_.model.shape.top_k;
    const v1::DataType type = WireType(options_.model.shape.dtype);
    LRMOE_RETURN_IF_ERROR(Describe("x", tensors.x, type, {t, h}, request.mutable_x()));
    LRMOE_RETURN_IF_ERROR(Describe("expert_idx", std::as_bytes(tensors.expert_idx), v1::DATA_TYPE_INT32,
                                   {t, k}, request.mutable_expert_idx()));
    LRMOE_RETURN_IF_ERROR(
        Describe("alpha", std::as_bytes(tensors.alpha), v1::DATA_TYPE_FP32, {t, k}, request.mutable_alpha()));
    LRMOE_RETURN_IF_ERROR(Describe("y", tensors.y, type, {t, h}, request.mutable_y()));
    request.set_evaluation(!tensors.needs_backward);
    v1::ForwardResponse response;
    LRMOE_RETURN_IF_ERROR(Call(&v1::Worker::Stub::Forward, request, &response));
    return SummaryFromWire(response.summary());
  }

  absl::StatusOr<InvocationSummary> Backward(const Invocation& invocation,
                                             const BackwardTensors& tensors) override {
    v1::BackwardRequest request;
    ToWire(invocation, request.mutable_invocation());
    const int64_t t = tensors.num_tokens, h = options_.model.shape.hidden_size,
                  k = options_.model.shape.top_k;
    const v1::DataType type = WireType(options_.model.shape.dtype);
    LRMOE_RETURN_IF_ERROR(Describe("dy", tensors.dy, type, {t, h}, request.mutable_dy()));
    LRMOE_RETURN_IF_ERROR(Describe("dx", tensors.dx, type, {t, h}, request.mutable_dx()));
    LRMOE_RETURN_IF_ERROR(Describe("dalpha", std::as_bytes(tensors.dalpha), v1::DATA_TYPE_FP32, {t, k},
                                   request.mutable_dalpha()));
    if (!tensors.kept.empty()) {
      LRMOE_RETURN_IF_ERROR(
          Describe("kept", std::as_bytes(tensors.kept), v1::DATA_TYPE_UINT8, {t, k}, request.mutable_kept()));
    }
    v1::BackwardResponse response;
    LRMOE_RETURN_IF_ERROR(Call(&v1::Worker::Stub::Backward, request, &response));
    return SummaryFromWire(response.summary());
  }

  absl::Status Discard(const Invocation& invocation) override {
    v1::DiscardRequest request;
    ToWire(invocation, request.mutable_invocation());
    v1::DiscardResponse response;
    return Call(&v1::Worker::Stub::Discard, request, &response);
  }

  absl::StatusOr<ParameterVersion> OptimizerStep(const AdamWSettings& settings) override {
    v1::OptimizerStepRequest request;
    request.set_step(settings.step);
    request.set_lr(settings.lr);
    request.set_beta1(settings.beta1);
    request.set_beta2(settings.beta2);
    request.set_eps(settings.eps);
    request.set_weight_decay(settings.weight_decay);
    request.set_gradient_scale(settings.gradient_scale);
    v1::OptimizerStepResponse response;
    LRMOE_RETURN_IF_ERROR(Call(&v1::Worker::Stub::OptimizerStep, request, &response));
    return ParameterVersion{response.parameter_version()};
  }

  absl::StatusOr<double> SquaredGradientNorm() override {
    v1::GradientNormRequest request;
    v1::GradientNormResponse response;
    LRMOE_RETURN_IF_ERROR(Call(&v1::Worker::Stub::GradientNorm, request, &response));
    return response.squared_norm();
  }

  absl::Status ZeroGradients() override {
    v1::ZeroGradientsRequest request;
    v1::ZeroGradientsResponse response;
    return Call(&v1::Worker::Stub::ZeroGradients, request, &response);
  }

  absl::Status SaveCheckpoint(const std::string& directory, int64_t step) override {
    v1::SaveCheckpointRequest request;
    request.set_directory(directory);
    request.set_step(step);
    v1::SaveCheckpointResponse response;
    return Call(&v1::Worker::Stub::SaveCheckpoint, request, &response);
  }

  absl::StatusOr<LoadedCheckpoint> LoadCheckpoint(const std::string& directory, int64_t step) override {
    v1::LoadCheckpointRequest request;
    request.set_directory(directory);
    request.set_step(step);
    v1::LoadCheckpointResponse response;
    LRMOE_RETURN_IF_ERROR(Call(&v1::Worker::Stub::LoadCheckpoint, request, &response));
    return LoadedCheckpoint{response.step(), response.optimizer_step()};
  }

 private:
  template <typename Request, typename Response>
  absl::Status Call(grpc::Status (v1::Worker::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    Request& request, Response* response) {
    LRMOE_RETURN_IF_ERROR(health());
    request.set_session(session_);
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + options_.call_timeout);
    return FromGrpc((stub_.get()->*method)(&context, request, response));
  }

  absl::Status Describe(absl::string_view field, std::span<const std::byte> bytes, v1::DataType type,
                        std::initializer_list<int64_t> shape, v1::Tensor* tensor) const {
    int64_t needed = type == v1::DATA_TYPE_UINT8 ? 1 : type == v1::DATA_TYPE_BF16 ? 2 : 4;
    for (int64_t size : shape) needed *= size;
    if (static_cast<int64_t>(bytes.size()) != needed) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ": ", bytes.size(), " bytes, its shape needs ", needed));
    }
    tensor->set_dtype(type);
    tensor->mutable_shape()->Assign(shape.begin(), shape.end());
    return arenas_.Describe(field, bytes.data(), bytes.size(), tensor);
  }

  absl::Status Export(int32_t layer, int32_t expert_idx, v1::ExpertContent content, std::span<float> gate_up,
                      std::span<float> down) {
    v1::ExportExpertRequest request;
    request.set_layer(layer);
    request.set_expert(expert_idx);
    request.set_content(content);
    const LayerShape& shape = options_.model.shape;
    LRMOE_RETURN_IF_ERROR(Describe("gate_up", std::as_bytes(gate_up), v1::DATA_TYPE_FP32,
                                   {shape.fc1_width(), shape.hidden_size}, request.mutable_gate_up()));
    LRMOE_RETURN_IF_ERROR(Describe("down", std::as_bytes(down), v1::DATA_TYPE_FP32,
                                   {shape.hidden_size, shape.intermediate_size}, request.mutable_down()));
    v1::ExportExpertResponse response;
    return Call(&v1::Worker::Stub::ExportExpert, request, &response);
  }

  void Release(uint64_t id) {
    arenas_.Remove(id);
    v1::ReleaseArenaRequest request;
    request.set_arena(id);
    v1::ReleaseArenaResponse response;
    (void)Call(&v1::Worker::Stub::ReleaseArena, request, &response);  // goes with the session at the latest
  }

  const Options options_;
  std::unique_ptr<v1::Worker::Stub> stub_;
  uint64_t session_ = 0;  // 0 before it is attached
  int32_t rank_ = 0, world_size_ = 1;
  std::vector<int32_t> owned_;
  ArenaIndex arenas_;
  std::unique_ptr<AttachCall> call_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<Session>> Session::Attach(const Options& options) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // no connection of an earlier session
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 200);
  auto channel =
      grpc::CreateCustomChannel("unix:" + options.socket, grpc::InsecureChannelCredentials(), arguments);
  if (!channel->WaitForConnected(std::chrono::system_clock::now() + options.connect_timeout)) {
    return absl::UnavailableError(absl::StrCat("no worker serves ", options.socket, " (waited ",
                                               options.connect_timeout.count(), " ms)"));
  }
  auto session = std::make_unique<RemoteSession>(options, std::move(channel));
  LRMOE_RETURN_IF_ERROR(session->Open());
  return session;
}

}  // namespace lrmoe::client
