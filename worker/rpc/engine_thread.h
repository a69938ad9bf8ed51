// The one thread that owns the engine and, through it, the transport. Requests become jobs in a bounded
// queue, done in the order they came. The first job that fails with DeadlineExceeded or Unavailable ends the
// epoch, as does any failure of what the engine does behind an answer: every job after it is answered with
// the reason, without touching the engine.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "worker/rpc/device_memory.h"
#include "worker/rpc/engine_port.h"

namespace lrmoe::worker {

// The engine, once a model is known. Belongs to the engine thread.
struct EngineSlot {
  ModelSpec model;
  std::unique_ptr<EnginePort> engine;  // null before the first attach
  Openings openings;                   // of its device; after the engine, to be closed before it goes
};

class EngineThread {
 public:
  struct Job {
    // On the engine thread, unless the epoch is over. Destroyed before `done`, and then what nothing else
    // needs of the slot's openings.
    std::function<absl::Status(EngineSlot&)> run;
    std::function<void(const absl::Status&)> done;  // always, once, on the engine thread
  };

  // `on_dead`: a job's error ended the epoch; called once, on the engine thread, after that job's `done`.
  explicit EngineThread(std::function<void(const absl::Status&)> on_dead);
  ~EngineThread();

  // Any thread. ResourceExhausted when kMaxQueuedJobs wait already (a client makes one call at a time; more
  // than a few means it does not wait for answers), Unavailable after Stop. `done` is then not called.
  absl::Status Post(Job job);
  // Any thread. The epoch is over: jobs that have not started are answered with Unavailable(reason).
  // Idempotent.
  void EndEpoch(absl::string_view reason);
  // Finishes what is queued, destroys the engine on its thread, joins. Not from the engine thread.
  void Stop();

  static constexpr size_t kMaxQueuedJobs = 64;

 private:
  void Run();
  absl::Status RunJob(Job& job, const absl::Status& ended, EngineSlot& slot);
  absl::Status EndWith(absl::Status& status);

  const std::function<void(const absl::Status&)> on_dead_;
  std::mutex mutex_;
  std::condition_variable wake_;
  std::deque<Job> jobs_;   // guarded by mutex_
  absl::Status ended_;     // guarded by mutex_; not OK once the epoch is over
  bool stopping_ = false;  // guarded by mutex_
  std::thread thread_;     // last: it uses the rest
};

}  // namespace lrmoe::worker
