// The open end of one Attach call. As long as it is open, the client lives.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "lrmoe/v1/worker.pb.h"

namespace lrmoe::worker {

// Any thread. Each ending happens at most once; what comes after it is ignored.
class AttachStream final : public grpc::ServerWriteReactor<v1::SessionEvent> {
 public:
  // `on_gone`: the call is over, for whatever reason; once, on a gRPC thread, possibly before Create's caller
  // goes on.
  static std::shared_ptr<AttachStream> Create(std::function<void()> on_gone);

  void Accept(const v1::Attached& attached);  // the first message
  void Close(const absl::Status& status);     // ends the call
  // Tells the client that the epoch is over, then ends the call with Unavailable(reason).
  void CloseWithEnded(const std::string& reason);

 private:
  explicit AttachStream(std::function<void()> on_gone) : on_gone_(std::move(on_gone)) {}
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  const std::function<void()> on_gone_;
  std::shared_ptr<AttachStream> self_;  // until OnDone
  std::mutex mutex_;
  v1::SessionEvent event_;                   // guarded by mutex_ while not being written
  bool writing_ = false;                     // guarded by mutex_
  bool finished_ = false;                    // guarded by mutex_
  std::optional<std::string> ended_reason_;  // guarded by mutex_; waits for the write before it
};

}  // namespace lrmoe::worker
