// Puts the worker's parts together and decides how it ends: the main thread's loop over signals, the janitor,
// the controller session, the engine and the MPI launcher. Everything ends in one of two ways.
//   Orderly: the training process exited with 0 on this rank; the worker waits in Engine::Finish until it did
//   on all
//     ranks, leaves the controller, exits 0.
//   Not orderly: the first cause is logged, told to the controller (which ends the epoch on the other ranks),
//   given to
//     every client call as error, and decides the exit status. A training process that still runs has
//     kLingerMs to act on the error, then gets SIGTERM, then SIGKILL from the janitor.
#pragma once

#include <signal.h>

#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "worker/agent/agent.h"
#include "worker/launcher/janitor.h"
#include "worker/place.h"
#include "worker/rpc/controller_session.h"
#include "worker/rpc/socket_server.h"
#include "worker/rpc/worker_service.h"
#include "worker/settings.h"

namespace lrmoe {

class Supervisor {
 public:
  // `signals` are blocked in every thread. `place` and `janitor` outlive it.
  Supervisor(const WorkerSettings& settings, const sigset_t& signals, Place* place,
             launcher::Janitor* janitor);
  ~Supervisor();

  // Until the worker is to end; returns its exit status. Everything is shut down then, but MPI.
  int Run();

 private:
  // From other threads to the loop.
  struct EpochEnded {
    int exit_status;
    std::string reason;
    bool tell_controller;
  };
  struct DrainAsked {
    std::string reason;
  };
  struct Finished {
    absl::Status status;
  };
  using Notice = std::variant<EpochEnded, DrainAsked, Finished>;

  // How the worker ends, once that is decided.
  struct Ending {
    int exit_status = kExitFailed;
    std::string reason;
    bool tell_controller = true;  // Leaving{failed}
  };

  absl::Status Start();
  absl::Status StartServer();
  absl::Status StartTrainer();
  void StartSession();
  worker::ServiceOptions MakeServiceOptions();

  void LetTheCauseEndFirst();

  void Loop();
  void Notify(Notice notice);  // any thread
  void OnSignal();
  void OnJanitor();
  void OnNotices();
  void OnLauncherDeath();
  void OnTrainerEnded(const launcher::TrainerEnded& ended);
  void Finish();
  // The first cause wins.
  void End(Ending ending);
  // After End: when to do what next to a training process that still runs.
  void Escalate();
  bool Over() const;
  void ShutDown();
  int TimeoutMs() const;

  const WorkerSettings& settings_;
  Place* const place_;
  launcher::Janitor* const janitor_;
  int signal_fd_ = -1, notice_fd_ = -1, launcher_fd_ = -1;

  std::mutex mutex_;
  std::deque<Notice> notices_;  // guarded by mutex_

  std::unique_ptr<worker::ControllerSession> session_;
  std::unique_ptr<worker::WorkerService> service_;
  std::unique_ptr<worker::SocketServer> server_;
  std::thread finishing_;  // waits in Engine::Finish

  // The loop's state.
  pid_t trainer_ = 0;  // 0: not running
  bool janitor_died_ = false;
  int got_signal_ = 0;    // the first SIGTERM or SIGINT
  bool orderly_ = false;  // finished; nothing left to do
  std::optional<Ending> ending_;
  std::optional<std::chrono::steady_clock::time_point> next_step_;  // of Escalate
  int escalation_ = 0;
};

}  // namespace lrmoe
