#include "controller/rpc/controller_service.h"

#include <deque>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "controller/rpc/status.h"
#include "google/protobuf/arena.h"
#include "proto/convert.h"

namespace lrmoe::rpc {

// gRPC's threads call On...; the loop calls Send, Close, Taken. The mutex is held over Start... and Finish,
// so that nothing is started after Finish; gRPC runs their completions on other threads.
class SessionReactor final : public grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer> {
 public:
  SessionReactor(ControllerService* service, core::SessionId session)
      : service_(service), session_(session) {}

  void Begin() {
    std::lock_guard lock(mutex_);
    StartRead(&incoming_);
  }

  void OnReadDone(bool ok) override {
    v1::WorkerMessage wire;
    if (!ok || !grpc::SerializationTraits<v1::WorkerMessage>::Deserialize(&incoming_, &wire).ok()) {
      OnEnd();
      return;
    }
    absl::StatusOr<WorkerMessage> message = FromWire(wire);
    const bool leaving = message.ok() && std::holds_alternative<Leaving>(*message);
    const bool ignorable = wire.has_report();
    {
      std::lock_guard lock(mutex_);
      said_leaving_ |= leaving;
      ++untaken_;
    }
    if (message.ok()) {
      service_->server_->Post(core::SessionMessage{session_, *std::move(message)});
    } else {
      service_->server_->Post(core::SessionInvalid{session_, message.status(), ignorable});
    }
    std::lock_guard lock(mutex_);
    if (closing_.has_value()) return;
    if (untaken_ < kMaxUntaken) {
      StartRead(&incoming_);
    } else {
      stalled_ = true;  // the loop goes on reading when it has caught up
    }
  }

  void OnWriteDone(bool ok) override {
    std::lock_guard lock(mutex_);
    writing_ = false;
    outgoing_.pop_front();
    if (!ok) outgoing_.clear();  // the reads fail too, which ends the session
    Continue();
  }

  void OnCancel() override {}  // the outstanding read fails

  void OnDone() override {
    service_->server_->Post(
        core::SessionClosed{session_, "its connection ended"});  // a second one is ignored
    service_->Forget(session_);
  }

  // `message` shares its bytes with the other sessions' copies.
  void Send(grpc::ByteBuffer message) {
    std::unique_lock lock(mutex_);
    if (closing_.has_value()) return;
    if (outgoing_.size() >= kMaxOutgoing) {
      const std::string reason = absl::StrCat("it does not read: ", kMaxOutgoing, " messages wait for it");
      outgoing_.resize(writing_ ? 1 : 0);
      closing_ = absl::ResourceExhaustedError(reason);
      Continue();
      lock.unlock();
      service_->server_->Post(core::SessionClosed{session_, reason});
      return;
    }
    outgoing_.push_back(std::move(message));
    Continue();
  }

  void Close(const absl::Status& status) {
    std::lock_guard lock(mutex_);
    if (closing_.has_value()) return;
    closing_ = status;
    Continue();
  }

  void Taken() {
    std::lock_guard lock(mutex_);
    --untaken_;
    if (!stalled_ || closing_.has_value()) return;
    stalled_ = false;
    StartRead(&incoming_);
  }

 private:
  // A worker waits for its plan before it counts again; between two plans it may report a few invocations.
  static constexpr int kMaxUntaken = 32;
  // A worker that reads has a handful of messages on their way.
  static constexpr size_t kMaxOutgoing = 1024;

  // The stream ended from the other side, or carried what cannot be parsed.
  void OnEnd() {
    bool said_leaving;
    {
      std::lock_guard lock(mutex_);
      said_leaving = said_leaving_;
    }
    service_->server_->Post(core::SessionClosed{session_, "its connection ended"});
    Close(said_leaving ? absl::OkStatus()
                       : absl::InvalidArgumentError(
                             "the stream ended without a leaving message, or carried something other than "
                             "lrmoe.v1.WorkerMessage"));
  }

  // Writes what is next, or finishes once all is written. Needs mutex_.
  void Continue() {
    if (writing_ || finished_) return;
    if (!outgoing_.empty()) {
      writing_ = true;
      StartWrite(&outgoing_.front());
    } else if (closing_.has_value()) {
      finished_ = true;
      Finish(ToGrpc(*closing_));
    }
  }

  ControllerService* const service_;
  const core::SessionId session_;
  grpc::ByteBuffer incoming_;  // the outstanding read's

  std::mutex mutex_;
  std::deque<grpc::ByteBuffer> outgoing_;  // the first is being written if writing_
  std::optional<absl::Status> closing_;    // set: nothing more is taken in
  bool writing_ = false;
  bool finished_ = false;
  bool stalled_ = false;
  bool said_leaving_ = false;
  int untaken_ = 0;  // posted, not yet taken by the loop
};

grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* ControllerService::Session(
    grpc::CallbackServerContext*) {
  const core::SessionId session = server_->NewSessionId();
  auto reactor = std::make_shared<SessionReactor>(this, session);
  {
    std::lock_guard lock(mutex_);
    reactors_[session] = reactor;
  }
  server_->Post(core::SessionOpened{session});
  reactor->Begin();
  return reactor.get();
}

std::shared_ptr<SessionReactor> ControllerService::Find(core::SessionId session) {
  std::lock_guard lock(mutex_);
  const auto found = reactors_.find(session);
  return found == reactors_.end() ? nullptr : found->second;
}

void ControllerService::Forget(core::SessionId session) {
  std::shared_ptr<SessionReactor> last;  // destroyed after the lock
  std::lock_guard lock(mutex_);
  const auto found = reactors_.find(session);
  if (found == reactors_.end()) return;
  last = std::move(found->second);
  reactors_.erase(found);
}

void ControllerService::Send(const std::vector<core::SessionId>& sessions,
                             const std::shared_ptr<const ControllerMessage>& message) {
  google::protobuf::Arena arena;  // a plan is hundreds of small messages
  auto* wire = google::protobuf::Arena::CreateMessage<v1::ControllerMessage>(&arena);
  ToWire(*message, wire);
  grpc::ByteBuffer bytes;
  bool own_buffer = false;
  LRMOE_CHECK(grpc::SerializationTraits<v1::ControllerMessage>::Serialize(*wire, &bytes, &own_buffer).ok());
  for (core::SessionId session : sessions)
    if (const auto reactor = Find(session)) reactor->Send(bytes);
}

void ControllerService::Close(core::SessionId session, const absl::Status& status) {
  if (const auto reactor = Find(session)) reactor->Close(status);
}

void ControllerService::Taken(core::SessionId session) {
  if (const auto reactor = Find(session)) reactor->Taken();
}

}  // namespace lrmoe::rpc
