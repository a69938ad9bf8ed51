// Bad requests, sent as raw messages: each gets an error that names the field, takes part in its collective
// by refusing it, and the worker goes on serving.
#include <functional>

#include "absl/strings/match.h"
#include "tests/contract/worker_rpc/fixture.h"
#include "tests/contract/worker_rpc/raw_client.h"

namespace lrmoe::worker {
namespace {

template <typename Request>
struct BadRequest {
  std::string message;  // what the error must contain
  std::function<void(Request&)> spoil;
};

template <typename Request>
void CheckRefused(Worker& worker, RawClient& client, const Request& good, engine::Operation operation,
                  const std::vector<BadRequest<Request>>& cases) {
  CHECK(client.Call(good).ok());
  for (const auto& bad : cases) {
    CAPTURE(bad.message);
    Request request = good;
    bad.spoil(request);
    worker.script.Clear();
    const grpc::Status status = client.Call(request);
    CAPTURE(status.error_message());
    CHECK((status.error_code() == grpc::INVALID_ARGUMENT || status.error_code() == grpc::NOT_FOUND));
    CHECK(absl::StrContains(status.error_message(), bad.message));
    CHECK(worker.script.Calls() == std::vector{absl::StrCat("refuse ", static_cast<int>(operation))});
  }
  CHECK(client.Call(good).ok());
}

TEST_CASE("bad forward requests are refused on all ranks", "[worker_rpc]") {
  Worker worker;
  RawClient client(worker);
  using R = v1::ForwardRequest;
  CheckRefused<R>(
      worker, client, client.Forward(), engine::Operation::kForward,
      {
          {"x.arena: arena 99", [](R& r) { r.mutable_x()->set_arena(99); }},
          {"x.offset_bytes: 63", [](R& r) { r.mutable_x()->set_offset_bytes(63); }},
          {"x.offset_bytes: -64", [](R& r) { r.mutable_x()->set_offset_bytes(-64); }},
          {"y.offset_bytes: 9984, allowed are multiples of 64 in 0..9680",
           [](R& r) { r.mutable_y()->set_offset_bytes(9984); }},
          {"y.offset_bytes: 9223372036854775744",
           [](R& r) { r.mutable_y()->set_offset_bytes(INT64_MAX - 63); }},
          {"x.dtype: DATA_TYPE_BF16, allowed is DATA_TYPE_FP32",
           [](R& r) { r.mutable_x()->set_dtype(v1::DATA_TYPE_BF16); }},
          {"expert_idx.dtype: 77",
           [](R& r) { r.mutable_expert_idx()->set_dtype(static_cast<v1::DataType>(77)); }},
          {"x.shape: [5, 17], allowed is [any, 16]", [](R& r) { r.mutable_x()->set_shape(1, 17); }},
          {"x.shape: [-1, 16], allowed is [any, 16]", [](R& r) { r.mutable_x()->set_shape(0, -1); }},
          {"x.shape: [5, 16, 0, 0, 0, 0, 0, 0, ...] of 1002 sizes, allowed is [any, 16]",
           [](R& r) {
             for (int i = 0; i < 1000; ++i) r.mutable_x()->add_shape(0);
           }},
          {"x.shape: [-5, 16]", [](R& r) { r.mutable_x()->set_shape(0, -5); }},
          {"y.shape: [4, 16], allowed is [5, 16]", [](R& r) { r.mutable_y()->set_shape(0, 4); }},
          {"alpha.shape: [5, 3], allowed is [5, 2]", [](R& r) { r.mutable_alpha()->set_shape(1, 3); }},
          {"expert_idx.shape: [5, 2, 1]", [](R& r) { r.mutable_expert_idx()->add_shape(1); }},
          {"expert_idx.shape: []", [](R& r) { r.mutable_expert_idx()->clear_shape(); }},
          {"x: 10048 bytes do not fit arena", [](R& r) { r.mutable_x()->set_shape(0, 157); }},
          {"over 2^63 bytes", [](R& r) { r.mutable_x()->set_shape(0, INT64_MAX / 16); }},
          {"x: 9223372036854775744 bytes do not fit",
           [](R& r) { r.mutable_x()->set_shape(0, INT64_MAX / 64); }},
          {"y is written and overlaps x", [](R& r) { r.mutable_y()->set_offset_bytes(256); }},
          {"y is written and overlaps alpha", [](R& r) { r.mutable_alpha()->set_offset_bytes(576); }},
          {"layer", [](R& r) { r.mutable_invocation()->set_layer(3); }},
          {"layer", [](R& r) { r.mutable_invocation()->set_layer(-1); }},
          {"step", [](R& r) { r.mutable_invocation()->set_step(-1); }},
          {"micro_batch", [](R& r) { r.mutable_invocation()->set_micro_batch(-1); }},
      });
}

TEST_CASE("bad backward requests are refused on all ranks", "[worker_rpc]") {
  Worker worker;
  RawClient client(worker);
  using R = v1::BackwardRequest;
  CheckRefused<R>(
      worker, client, client.Backward(), engine::Operation::kBackward,
      {
          {"dy.shape: [5], allowed is [any, 16]",
           [](R& r) { r.mutable_dy()->mutable_shape()->RemoveLast(); }},
          {"dx.shape: [6, 16], allowed is [5, 16]", [](R& r) { r.mutable_dx()->set_shape(0, 6); }},
          {"dalpha.dtype: DATA_TYPE_INT32", [](R& r) { r.mutable_dalpha()->set_dtype(v1::DATA_TYPE_INT32); }},
          {"kept.dtype: DATA_TYPE_UNSPECIFIED", [](R& r) { r.mutable_kept()->clear_dtype(); }},
          {"dx is written and overlaps dalpha", [](R& r) { r.mutable_dalpha()->set_offset_bytes(576); }},
          {"dalpha is written and overlaps kept", [](R& r) { r.mutable_kept()->set_offset_bytes(640); }},
          {"dy.arena: arena 0", [](R& r) { r.mutable_dy()->clear_arena(); }},
      });
  v1::BackwardRequest without = client.Backward();
  without.clear_kept();
  CHECK(client.Call(without).ok());
}

TEST_CASE("bad settings of other collectives are refused on all ranks", "[worker_rpc]") {
  Worker worker;
  RawClient client(worker);
  v1::OptimizerStepRequest good;
  good.set_session(client.session);
  good.set_step(1);
  good.set_lr(0.1);
  good.set_beta1(0.9);
  good.set_beta2(0.99);
  good.set_eps(1e-8);
  good.set_gradient_scale(1);
  v1::OptimizerStepResponse response;
  CHECK(client.Call(&v1::Worker::Stub::OptimizerStep, good, &response).ok());
  const std::vector<BadRequest<v1::OptimizerStepRequest>> cases = {
      {"step: 0", [](auto& r) { r.set_step(0); }},
      {"lr: -1", [](auto& r) { r.set_lr(-1); }},
      {"lr: nan", [](auto& r) { r.set_lr(NAN); }},
      {"beta1: 1", [](auto& r) { r.set_beta1(1); }},
      {"beta2: -0.5", [](auto& r) { r.set_beta2(-0.5); }},
      {"eps: inf", [](auto& r) { r.set_eps(INFINITY); }},
      {"weight_decay: -1", [](auto& r) { r.set_weight_decay(-1); }},
      {"gradient_scale: inf", [](auto& r) { r.set_gradient_scale(INFINITY); }},
  };
  for (const auto& bad : cases) {
    CAPTURE(bad.message);
    v1::OptimizerStepRequest request = good;
    bad.spoil(request);
    worker.script.Clear();
    const grpc::Status status = client.Call(&v1::Worker::Stub::OptimizerStep, request, &response);
    CHECK(status.error_code() == grpc::INVALID_ARGUMENT);
    CHECK(absl::StrContains(status.error_message(), bad.message));
    CHECK(worker.script.Calls().size() == 1);
    CHECK(absl::StartsWith(worker.script.Calls()[0], "refuse"));
  }
  v1::SaveCheckpointRequest save;
  save.set_session(client.session);
  v1::SaveCheckpointResponse saved;
  for (const std::string& directory :
       {std::string(), std::string("relative"), "/" + std::string(5000, 'x')}) {
    save.set_directory(directory);
    CHECK(client.Call(&v1::Worker::Stub::SaveCheckpoint, save, &saved).error_code() ==
          grpc::INVALID_ARGUMENT);
  }
  save.set_directory("/x");
  save.set_step(-1);
  CHECK(client.Call(&v1::Worker::Stub::SaveCheckpoint, save, &saved).error_code() == grpc::INVALID_ARGUMENT);
  v1::FinishLoadRequest finish;
  finish.set_session(client.session);
  finish.set_layer(3);
  v1::FinishLoadResponse finished;
  CHECK(absl::StrContains(client.Call(&v1::Worker::Stub::FinishLoad, finish, &finished).error_message(),
                          "layer: 3, allowed is 0..2"));
}

TEST_CASE("bad local requests get their error without the other ranks", "[worker_rpc]") {
  Worker worker;
  RawClient client(worker);
  worker.script.Clear();
  v1::LoadExpertRequest load;
  load.set_session(client.session);
  load.set_layer(0);
  load.set_expert(2);
  v1::LoadExpertResponse loaded;
  CHECK(absl::StrContains(client.Call(&v1::Worker::Stub::LoadExpert, load, &loaded).error_message(),
                          "expert: 2, allowed is 0..1"));
  load.set_expert(1);
  CHECK(absl::StrContains(client.Call(&v1::Worker::Stub::LoadExpert, load, &loaded).error_message(),
                          "gate_up.dtype: DATA_TYPE_UNSPECIFIED"));
  *load.mutable_gate_up() = client.Tensor(v1::DATA_TYPE_BF16, {16, 16}, 0);
  *load.mutable_down() = client.Tensor(v1::DATA_TYPE_FP32, {16, 8}, 1024);
  CHECK(absl::StrContains(client.Call(&v1::Worker::Stub::LoadExpert, load, &loaded).error_message(),
                          "down.dtype"));
  v1::ExportExpertRequest read;
  read.set_session(client.session);
  v1::ExportExpertResponse response;
  CHECK(absl::StrContains(client.Call(&v1::Worker::Stub::ExportExpert, read, &response).error_message(),
                          "content: 0"));
  CHECK(worker.script.Calls().empty());
}

TEST_CASE("requests without an open session are refused", "[worker_rpc]") {
  Worker worker;
  RawClient client(worker);
  worker.script.Clear();
  v1::ForwardRequest request = client.Forward();
  request.set_session(client.session + 1);
  const grpc::Status status = client.Call(request);
  CHECK(status.error_code() == grpc::FAILED_PRECONDITION);
  CHECK(absl::StrContains(status.error_message(), "is not open; attach first"));
  v1::CreateArenaRequest create;
  v1::Arena arena;
  CHECK(client.Call(&v1::Worker::Stub::CreateArena, create, &arena).error_code() ==
        grpc::FAILED_PRECONDITION);
  v1::DetachRequest detach;
  v1::DetachResponse detached;
  CHECK(client.Call(&v1::Worker::Stub::Detach, detach, &detached).error_code() == grpc::FAILED_PRECONDITION);
  CHECK(worker.script.Calls().empty());
}

TEST_CASE("bad attach requests are refused by name", "[worker_rpc]") {
  Worker worker;
  auto stub =
      v1::Worker::NewStub(grpc::CreateChannel("unix:" + worker.socket(), grpc::InsecureChannelCredentials()));
  const std::vector<BadRequest<v1::AttachRequest>> cases = {
      {"protocol_version: 2, this worker speaks 1", [](auto& r) { r.set_protocol_version(2); }},
      {"client: 257 bytes", [](auto& r) { r.set_client(std::string(257, 'c')); }},
      {"expected_world_size: 2, this worker is one of 1", [](auto& r) { r.set_expected_world_size(2); }},
      {"model", [](auto& r) { r.clear_model(); }},
      {"top_k", [](auto& r) { r.mutable_model()->set_top_k(3); }},
      {"num_layers", [](auto& r) { r.mutable_model()->set_num_layers(0); }},
  };
  for (const auto& bad : cases) {
    CAPTURE(bad.message);
    v1::AttachRequest request = RawClient::AttachRequest();
    bad.spoil(request);
    grpc::ClientContext context;
    auto reader = stub->Attach(&context, request);
    v1::SessionEvent event;
    CHECK(!reader->Read(&event));
    const grpc::Status status = reader->Finish();
    CAPTURE(status.error_message());
    CHECK(!status.ok());
    if (bad.message != "model") CHECK(absl::StrContains(status.error_message(), bad.message));
  }
  CHECK(worker.script.Calls().empty());
  CHECK(worker.Attach()->health() == absl::OkStatus());
}

}  // namespace
}  // namespace lrmoe::worker
