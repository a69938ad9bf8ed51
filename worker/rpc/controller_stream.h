// One gRPC stream to the controller. Sends messages in order, hands received ones on, converted and
// validated.
#pragma once

#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/client_callback.h>

#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/session.h"
#include "lrmoe/v1/controller.pb.h"

namespace lrmoe::worker {

class ControllerStream final : public grpc::ClientBidiReactor<v1::WorkerMessage, grpc::ByteBuffer> {
 public:
  // Called on gRPC threads, one at a time; must not block. May send.
  struct Callbacks {
    std::function<void()> opened;  // the peer took the first message
    std::function<void(absl::StatusOr<ControllerMessage>)> received;
    std::function<void(const absl::Status&)> closed;  // once, last
  };

  // Opens a connection of its own to `address` ("host:port"). Destroy it after `closed` was called, on a
  // thread that is not gRPC's: the last channel's end waits for gRPC's threads.
  static std::unique_ptr<ControllerStream> Open(const std::string& address, Callbacks callbacks);

  // Any thread. Queued; at most kMaxQueued wait for the network, then the stream is cancelled.
  void Send(const WorkerMessage& message);
  // Any thread. After what is queued: no more messages from here; the controller then ends the stream.
  void CloseAfterSending();
  // Any thread. At once.
  void Cancel() { context_.TryCancel(); }

  // A session sends a handful of messages per invocation; this many means that the controller does not read.
  static constexpr size_t kMaxQueued = 8192;

 private:
  using Stub = grpc::TemplatedGenericStub<v1::WorkerMessage, grpc::ByteBuffer>;

  explicit ControllerStream(Callbacks callbacks);
  void OnWriteDone(bool ok) override;
  void OnReadDone(bool ok) override;
  void OnDone(const grpc::Status& status) override;
  absl::StatusOr<ControllerMessage> Parse();  // what was read
  // With mutex_ held: starts what can be started.
  void Advance();

  const Callbacks callbacks_;
  std::unique_ptr<Stub> stub_;
  grpc::ClientContext context_;
  grpc::ByteBuffer incoming_;                  // of the read that runs
  const std::unique_ptr<char[]> arena_block_;  // where messages are parsed; read callbacks only
  bool first_written_ = false;                 // write callbacks only

  std::mutex mutex_;
  std::deque<v1::WorkerMessage> outgoing_;  // guarded by mutex_; the front is being written while writing_
  bool writing_ = false;                    // guarded by mutex_
  bool closing_ = false;                    // guarded by mutex_
  bool half_closed_ = false;                // guarded by mutex_
  bool broken_ = false;                     // guarded by mutex_; a write failed or the stream is done
};

}  // namespace lrmoe::worker
