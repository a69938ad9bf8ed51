// Shared memory between the worker and its training process. An arena is an anonymous memory file (memfd) of
// the worker, mapped here and exported as /proc/<worker pid>/fd/<n>. It has no name in any file system, so
// nothing is left behind whichever process dies how; the kernel lets only processes of the same user open it
// (the permission of /proc/<pid>/fd), in the same pid namespace. Its size is sealed: a client cannot shrink
// it under the worker.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lrmoe::worker {

class Arena {
 public:
  // ResourceExhausted when memory, address space or file descriptors cannot be had. `bytes` >= 1;
  // zero-filled.
  static absl::StatusOr<std::shared_ptr<Arena>> Create(uint64_t id, int64_t bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  uint64_t id() const { return id_; }
  std::span<std::byte> memory() const {
    return memory_;
  }                          // page-aligned; the client may write it at any time
  std::string path() const;  // for a process of the same user and pid namespace

 private:
  Arena(uint64_t id, int fd, std::span<std::byte> memory) : id_(id), fd_(fd), memory_(memory) {}
  const uint64_t id_;
  const int fd_;
  const std::span<std::byte> memory_;
};

struct ArenaLimits {
  int64_t max_arenas = 256;     // each holds a file descriptor and a mapping
  int64_t max_total_bytes = 0;  // > 0
};

// Physical memory of this machine: arenas beyond it could never be filled.
int64_t PhysicalMemoryBytes();

// The arenas of one session. Any thread. An arena that a running request uses lives until that request is
// done.
class ArenaSet {
 public:
  explicit ArenaSet(const ArenaLimits& limits) : limits_(limits) {}

  // InvalidArgument or ResourceExhausted naming the value and the limit.
  absl::StatusOr<std::shared_ptr<Arena>> Create(int64_t bytes);
  absl::Status Release(uint64_t id);                               // NotFound
  absl::StatusOr<std::shared_ptr<Arena>> Find(uint64_t id) const;  // NotFound
  void Clear();

 private:
  const ArenaLimits limits_;
  mutable std::mutex mutex_;
  std::map<uint64_t, std::shared_ptr<Arena>> arenas_;  // guarded by mutex_
  int64_t total_bytes_ = 0;                            // guarded by mutex_
  uint64_t last_id_ = 0;                               // guarded by mutex_; ids are never used twice
};

}  // namespace lrmoe::worker
