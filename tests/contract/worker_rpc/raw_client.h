// Requests as raw messages.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "tests/contract/worker_rpc/fixture.h"

namespace lrmoe::worker {

// A session without the client library, which would not send such requests.
struct RawClient {
  explicit RawClient(const Worker& worker) : RawClient(worker.socket()) {}
  explicit RawClient(const std::string& socket)
      : stub(v1::Worker::NewStub(grpc::CreateChannel("unix:" + socket, grpc::InsecureChannelCredentials()))) {
    v1::AttachRequest request = AttachRequest();
    reader = stub->Attach(&context, request);
    v1::SessionEvent event;
    REQUIRE(reader->Read(&event));
    session = event.attached().session();
    lane = event.attached().lane();
    device_uuid = event.attached().device_uuid();
    v1::CreateArenaRequest create;
    create.set_session(session);
    create.set_bytes(10000);
    REQUIRE(Call(&v1::Worker::Stub::CreateArena, create, &arena).ok());
    arena_id = arena.arena();
  }
  ~RawClient() {
    context.TryCancel();
    (void)reader->Finish();
  }

  static v1::AttachRequest AttachRequest() {
    v1::AttachRequest request;
    request.set_protocol_version(1);
    request.set_client("raw");
    auto* model = request.mutable_model();
    model->set_num_layers(3);
    model->set_num_experts(2);
    model->set_top_k(2);
    model->set_hidden_size(16);
    model->set_intermediate_size(8);
    model->set_gated(true);
    model->set_activation(v1::ACTIVATION_SILU);
    model->set_dtype(v1::DATA_TYPE_FP32);
    return request;
  }

  v1::Tensor Tensor(v1::DataType type, std::vector<int64_t> shape, int64_t offset) const {
    v1::Tensor tensor;
    tensor.set_arena(arena_id);
    tensor.set_offset_bytes(offset);
    tensor.set_dtype(type);
    tensor.mutable_shape()->Assign(shape.begin(), shape.end());
    return tensor;
  }
  v1::ForwardRequest Forward() const {
    v1::ForwardRequest request;
    request.set_session(session);
    request.mutable_invocation()->set_step(1);
    *request.mutable_x() = Tensor(v1::DATA_TYPE_FP32, {5, 16}, 0);
    *request.mutable_y() = Tensor(v1::DATA_TYPE_FP32, {5, 16}, 320);
    *request.mutable_expert_idx() = Tensor(v1::DATA_TYPE_INT32, {5, 2}, 640);
    *request.mutable_alpha() = Tensor(v1::DATA_TYPE_FP32, {5, 2}, 704);
    return request;
  }
  v1::BackwardRequest Backward() const {
    v1::BackwardRequest request;
    request.set_session(session);
    request.mutable_invocation()->set_step(1);
    *request.mutable_dy() = Tensor(v1::DATA_TYPE_FP32, {5, 16}, 0);
    *request.mutable_dx() = Tensor(v1::DATA_TYPE_FP32, {5, 16}, 320);
    *request.mutable_dalpha() = Tensor(v1::DATA_TYPE_FP32, {5, 2}, 640);
    *request.mutable_kept() = Tensor(v1::DATA_TYPE_UINT8, {5, 2}, 704);
    return request;
  }

  template <typename Request, typename Response>
  grpc::Status Call(grpc::Status (v1::Worker::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
                    const Request& request, Response* response) {
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + 60s);
    return (stub.get()->*method)(&call, request, response);
  }
  grpc::Status Call(const v1::ForwardRequest& request) {
    v1::ForwardResponse response;
    return Call(&v1::Worker::Stub::Forward, request, &response);
  }
  grpc::Status Call(const v1::BackwardRequest& request) {
    v1::BackwardResponse response;
    return Call(&v1::Worker::Stub::Backward, request, &response);
  }

  std::unique_ptr<v1::Worker::Stub> stub;
  grpc::ClientContext context;
  std::unique_ptr<grpc::ClientReader<v1::SessionEvent>> reader;
  uint64_t session = 0, arena_id = 0;
  v1::Arena arena;
  std::string lane;         // its path
  std::string device_uuid;  // empty: the CPU
};

}  // namespace lrmoe::worker
