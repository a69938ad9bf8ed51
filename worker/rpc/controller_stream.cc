#include "worker/rpc/controller_stream.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/impl/codegen/proto_utils.h>
#include <grpcpp/security/credentials.h>

#include <utility>

#include "google/protobuf/arena.h"
#include "proto/convert.h"
#include "worker/rpc/grpc_status.h"

namespace lrmoe::worker {
namespace {

// A controller host that vanished without a word is noticed after about this long.
constexpr int kKeepaliveMs = 2000;
constexpr const char* kMethod = "/lrmoe.v1.Controller/Session";
// A plan of 128 experts on 8 ranks takes half of it. Larger ones are parsed into blocks of their own.
constexpr size_t kArenaBlockBytes = 64 << 10;

std::shared_ptr<grpc::Channel> OpenChannel(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxSendMessageSize(kMaxWorkerMessageBytes);
  arguments.SetMaxReceiveMessageSize(kMaxControllerMessageBytes);
  // A fresh connection per attempt: the agent alone decides when to try again.
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, kKeepaliveMs);
  arguments.SetInt(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

ControllerStream::ControllerStream(Callbacks callbacks)
    : callbacks_(std::move(callbacks)), arena_block_(new char[kArenaBlockBytes]) {}

std::unique_ptr<ControllerStream> ControllerStream::Open(const std::string& address, Callbacks callbacks) {
  std::unique_ptr<ControllerStream> stream(new ControllerStream(std::move(callbacks)));
  stream->stub_ = std::make_unique<Stub>(OpenChannel(address));
  stream->stub_->PrepareBidiStreamingCall(&stream->context_, kMethod, {}, stream.get());
  stream->AddHold();  // until half-closed or broken: writes are started from other threads
  stream->StartRead(&stream->incoming_);
  stream->StartCall();
  return stream;
}

void ControllerStream::Send(const WorkerMessage& message) {
  std::lock_guard lock(mutex_);
  if (closing_ || broken_) return;
  if (outgoing_.size() >= kMaxQueued) {
    context_.TryCancel();
    return;
  }
  ToWire(message, &outgoing_.emplace_back());
  Advance();
}

void ControllerStream::CloseAfterSending() {
  std::lock_guard lock(mutex_);
  if (std::exchange(closing_, true) || broken_) return;
  Advance();
}

void ControllerStream::Advance() {
  if (writing_ || half_closed_ || broken_) return;
  if (!outgoing_.empty()) {
    writing_ = true;
    StartWrite(&outgoing_.front());
  } else if (closing_) {
    half_closed_ = true;
    StartWritesDone();
    RemoveHold();
  }
}

void ControllerStream::OnWriteDone(bool ok) {
  if (ok && !std::exchange(first_written_, true)) callbacks_.opened();
  std::lock_guard lock(mutex_);
  writing_ = false;
  outgoing_.pop_front();
  if (ok) return Advance();
  if (!std::exchange(broken_, true) && !half_closed_) RemoveHold();
}

void ControllerStream::OnReadDone(bool ok) {
  if (!ok) {
    // The controller ended the stream or the connection is lost; OnDone says which.
    std::lock_guard lock(mutex_);
    if (!std::exchange(broken_, true) && !half_closed_) RemoveHold();
    return;
  }
  callbacks_.received(Parse());
  StartRead(&incoming_);
}

// A plan is hundreds of small messages, which an arena holds in one block.
absl::StatusOr<ControllerMessage> ControllerStream::Parse() {
  google::protobuf::ArenaOptions options;
  options.initial_block = arena_block_.get();
  options.initial_block_size = kArenaBlockBytes;
  google::protobuf::Arena arena(options);
  auto* wire = google::protobuf::Arena::CreateMessage<v1::ControllerMessage>(&arena);
  if (!grpc::SerializationTraits<v1::ControllerMessage>::Deserialize(&incoming_, wire).ok()) {
    return absl::InvalidArgumentError("something other than lrmoe.v1.ControllerMessage");
  }
  return FromWire(*wire);
}

// Nothing may follow the call: the owner destroys the stream as soon as it was made.
void ControllerStream::OnDone(const grpc::Status& status) {
  callbacks_.closed(FromGrpc(status));
}

}  // namespace lrmoe::worker
