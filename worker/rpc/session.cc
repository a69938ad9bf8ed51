#include "worker/rpc/session.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace lrmoe::worker {

absl::Status SessionTable::Open(std::shared_ptr<Session> session) {
  std::lock_guard lock(mutex_);
  if (current_) {
    return absl::AlreadyExistsError(absl::StrCat("client \"", current_->client,
                                                 "\" is attached to this worker; it serves one at a time"));
  }
  current_ = std::move(session);
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<Session>> SessionTable::Find(uint64_t id) const {
  std::lock_guard lock(mutex_);
  if (!current_ || current_->id != id) {
    return absl::FailedPreconditionError(absl::StrCat("session: ", id, " is not open; attach first"));
  }
  return current_;
}

std::shared_ptr<Session> SessionTable::Close(uint64_t id) {
  std::lock_guard lock(mutex_);
  if (!current_ || current_->id != id) return nullptr;
  return std::exchange(current_, nullptr);
}

std::shared_ptr<Session> SessionTable::current() const {
  std::lock_guard lock(mutex_);
  return current_;
}

}  // namespace lrmoe::worker
