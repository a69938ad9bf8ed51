// A small process that outlives the worker for a moment. It is forked before the worker has threads, MPI or
// gRPC, in a session of its own so that no launcher kills it along with the worker. It starts the training
// process (a clean fork: one thread, none of the worker's files), reports how it ends, and when the worker
// ends, however that happens, kills what is left of the training process and its descendants and removes the
// socket.
//
//   worker killed    -> the janitor sees the closed pipe, kills the training process, removes the socket,
//   exits. trainer killed   -> the janitor reports it to the worker, which ends the job. janitor killed   ->
//   the kernel kills the training process (PR_SET_PDEATHSIG); the worker sees the closed pipe, kills
//                       the rest of its group, removes its socket itself and ends.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace lrmoe::launcher {

// What happened to the training process, or to the janitor.
struct TrainerStarted {
  pid_t pid;
};
struct TrainerNotStarted {
  int error;
};  // errno of fork or exec
struct TrainerEnded {
  int wait_status;
};  // as waitpid gives it
struct JanitorDied {};
using JanitorEvent = std::variant<TrainerStarted, TrainerNotStarted, TrainerEnded, JanitorDied>;

// One thread calls it.
class Janitor {
 public:
  // Forks; the child never returns. Call at the start of main, while the process has one thread. `command`:
  // program and arguments of the training process, looked up in PATH; empty when there will be none.
  // Unavailable when the fork fails.
  static absl::StatusOr<std::unique_ptr<Janitor>> Start(const std::vector<std::string>& command);
  // The janitor kills what is left of the training process, removes what it was told to, and is gone;
  // bounded.
  ~Janitor();

  int fd() const { return fd_; }  // readable when ReadEvent has something
  pid_t pid() const { return pid_; }

  // `who` for the janitor's messages, e.g. "lrmoe-worker[3]".
  absl::Status SetName(const std::string& who);
  // At the end removes the file (a socket, a shared memory file), then its directory if that is empty and
  // `remove_directory`.
  absl::Status RemoveAtEnd(const std::string& path, bool remove_directory);
  // Takes RemoveAtEnd of a file back.
  absl::Status KeepAtEnd(const std::string& path);
  // Starts the command with exactly this environment, in a process group of its own. An event tells the
  // outcome.
  absl::Status Launch(const std::vector<std::string>& environment);
  // To the training process's group; nothing when there is none.
  void Signal(int signal);

  JanitorEvent ReadEvent();  // waits for one

 private:
  Janitor(int fd, pid_t pid) : fd_(fd), pid_(pid) {}
  absl::Status Tell(uint8_t kind, const std::string& text);

  const int fd_;
  const pid_t pid_;
  pid_t trainer_ = 0;  // its process group, while it may run
  bool died_ = false;
};

// "was killed by signal 9 (Killed)", "exited with status 3".
std::string Describe(const TrainerEnded& ended);
// What a shell would exit with: the status, or 128 + the signal.
int ExitStatus(const TrainerEnded& ended);

}  // namespace lrmoe::launcher
