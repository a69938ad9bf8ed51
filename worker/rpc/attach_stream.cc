#include "worker/rpc/attach_stream.h"

#include <utility>

#include "worker/rpc/grpc_status.h"

namespace lrmoe::worker {

std::shared_ptr<AttachStream> AttachStream::Create(std::function<void()> on_gone) {
  std::shared_ptr<AttachStream> stream(new AttachStream(std::move(on_gone)));
  stream->self_ = stream;
  return stream;
}

void AttachStream::Accept(const v1::Attached& attached) {
  std::lock_guard lock(mutex_);
  if (finished_) return;
  *event_.mutable_attached() = attached;
  writing_ = true;
  StartWrite(&event_);
}

void AttachStream::Close(const absl::Status& status) {
  std::lock_guard lock(mutex_);
  if (std::exchange(finished_, true)) return;
  Finish(ToGrpc(status));
}

void AttachStream::CloseWithEnded(const std::string& reason) {
  std::lock_guard lock(mutex_);
  if (finished_ || ended_reason_) return;
  ended_reason_ = reason;
  if (writing_) return;  // OnWriteDone goes on
  finished_ = true;
  event_.mutable_ended()->set_reason(reason);
  StartWriteAndFinish(&event_, grpc::WriteOptions(), ToGrpc(absl::UnavailableError(reason)));
}

void AttachStream::OnWriteDone(bool ok) {
  std::lock_guard lock(mutex_);
  writing_ = false;
  if (finished_) return;
  if (!ok) {
    finished_ = true;
    Finish(grpc::Status::CANCELLED);
  } else if (ended_reason_) {
    finished_ = true;
    event_.mutable_ended()->set_reason(*ended_reason_);
    StartWriteAndFinish(&event_, grpc::WriteOptions(), ToGrpc(absl::UnavailableError(*ended_reason_)));
  }
}

void AttachStream::OnCancel() {
  Close(absl::CancelledError("the client is gone"));
}

void AttachStream::OnDone() {
  on_gone_();
  const std::shared_ptr<AttachStream> self = std::move(self_);  // may be the last reference
}

}  // namespace lrmoe::worker
