// The directory of --state-dir: made if missing, and locked for one controller.
#pragma once

#include <string>
#include <utility>

#include "absl/status/statusor.h"

namespace lrmoe::store {

class StateDirectory {
 public:
  // Makes `path` (mode 0700) if its parent is there. The lock is of the system, held by this object: it goes
  // with the process, however that ends. Errors name the path and the reason; FailedPrecondition when another
  // process has the lock, naming it.
  static absl::StatusOr<StateDirectory> Lock(const std::string& path);
  ~StateDirectory();
  StateDirectory(StateDirectory&& other) noexcept
      : path_(std::move(other.path_)), lock_(std::exchange(other.lock_, -1)) {}
  StateDirectory& operator=(StateDirectory&&) = delete;

  const std::string& path() const { return path_; }

 private:
  StateDirectory(std::string path, int lock) : path_(std::move(path)), lock_(lock) {}

  std::string path_;
  int lock_ = -1;
};

}  // namespace lrmoe::store
