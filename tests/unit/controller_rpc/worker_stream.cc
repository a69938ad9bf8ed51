#include "tests/unit/controller_rpc/worker_stream.h"

#include <chrono>
#include <stdexcept>

#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/security/credentials.h"
#include "proto/convert.h"

namespace lrmoe::test {

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a connection of its own
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

WorkerStream::WorkerStream(const std::shared_ptr<grpc::Channel>& channel)
    : stub_(v1::Controller::NewStub(channel)) {
  context_.set_deadline(std::chrono::system_clock::now() +
                        std::chrono::seconds(20));  // a test that hangs, fails
  stream_ = stub_->Session(&context_);
}

WorkerStream::~WorkerStream() {
  if (finished_) return;
  context_.TryCancel();
  Finish();
}

bool WorkerStream::Send(const WorkerMessage& message) {
  v1::WorkerMessage wire;
  ToWire(message, &wire);
  return stream_->Write(wire);
}

std::optional<ControllerMessage> WorkerStream::Receive() {
  v1::ControllerMessage wire;
  if (!stream_->Read(&wire)) return std::nullopt;
  absl::StatusOr<ControllerMessage> message = FromWire(wire);
  if (!message.ok()) throw std::runtime_error(std::string(message.status().message()));
  return *std::move(message);
}

grpc::Status WorkerStream::Finish() {
  v1::ControllerMessage rest;
  while (stream_->Read(&rest)) {
  }
  finished_ = true;
  return stream_->Finish();
}

void WorkerStream::Unexpected(const std::optional<ControllerMessage>& message) {
  if (!message.has_value()) {
    const grpc::Status status = Finish();
    throw std::runtime_error(
        absl::StrCat("the stream ended: ", status.error_code(), " ", status.error_message()));
  }
  v1::ControllerMessage wire;
  ToWire(*message, &wire);
  throw std::runtime_error(absl::StrCat("unexpected message: ", wire.ShortDebugString()));
}

Hello HelloOf(int32_t rank_idx, int32_t world_size, const std::string& job) {
  return {.rank_idx = rank_idx, .world_size = world_size, .job = job, .node = "node", .replica_slots = 1};
}

ModelSpec SmallModel() {
  return {.num_layers = 4,
          .shape = {.num_experts = 8, .top_k = 2, .hidden_size = 16, .intermediate_size = 16}};
}

}  // namespace lrmoe::test
