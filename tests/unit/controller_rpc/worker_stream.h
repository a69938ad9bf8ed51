// One worker's stream to a controller, from the client's side: sends domain messages, waits for answers.
#pragma once

#include <condition_variable>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "common/session.h"
#include "grpcpp/channel.h"
#include "lrmoe/v1/controller.grpc.pb.h"

namespace lrmoe::test {

std::shared_ptr<grpc::Channel> Connect(const std::string& address);

class WorkerStream {
 public:
  explicit WorkerStream(const std::shared_ptr<grpc::Channel>& channel);
  ~WorkerStream();  // cancels

  bool Send(const WorkerMessage& message);
  bool SendWire(const v1::WorkerMessage& message) { return stream_->Write(message); }
  // The next message; nullopt when the stream has ended.
  std::optional<ControllerMessage> Receive();
  // The next message of a type; anything else before it fails the test.
  template <typename T>
  T Expect() {
    std::optional<ControllerMessage> message = Receive();
    if (!message.has_value() || !std::holds_alternative<T>(*message)) Unexpected(message);
    return std::get<T>(*std::move(message));
  }
  void Cancel() { context_.TryCancel(); }
  bool WritesDone() { return stream_->WritesDone(); }
  // Reads to the end and returns how it ended.
  grpc::Status Finish();

 private:
  [[noreturn]] void Unexpected(const std::optional<ControllerMessage>& message);

  std::unique_ptr<v1::Controller::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::WorkerMessage, v1::ControllerMessage>> stream_;
  bool finished_ = false;
};

Hello HelloOf(int32_t rank_idx, int32_t world_size, const std::string& job = "job");
ModelSpec SmallModel();

}  // namespace lrmoe::test
