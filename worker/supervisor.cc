#include "worker/supervisor.h"

#include <poll.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "common/check.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "common/version.h"
#include "worker/backend.h"
#include "worker/engine_adapter.h"
#include "worker/launcher/environment.h"

namespace lrmoe {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

// Together with the controller_timeout of 5 s well under the 10 s in which a broken job must be gone.
constexpr milliseconds kLinger{1500};          // for the client to see its error and say so
constexpr milliseconds kTerminateGrace{1000};  // between SIGTERM and SIGKILL
// After a SIGTERM to the worker: for the training process to save what it wants. Launchers kill sooner.
constexpr milliseconds kStopGrace{30000};
constexpr milliseconds kCauseFirst{2000};  // for the rank that is the cause to end before this one
constexpr milliseconds kServerGrace{500};  // for the last replies to leave
// Shutting down waits for the engine to notice the abort; beyond this the process ends the hard way.
constexpr unsigned kMaxShutDownSeconds = 5;

int g_hard_exit_status = kExitFailed;
void ExitHard(int) {
  _exit(g_hard_exit_status);
}

std::string DefaultSocket(const Place& place) {
  const char* runtime = std::getenv("XDG_RUNTIME_DIR");
  // It may be set and not exist, as for root in a container.
  const bool usable = runtime != nullptr && runtime[0] == '/' && access(runtime, W_OK | X_OK) == 0;
  const std::string base = usable ? runtime : "/tmp";
  // The job's random name keeps others from guessing it; one directory per rank, so that each removes its
  // own.
  return absl::StrCat(base, "/lrmoe-", geteuid(), "-", place.job, "-", place.rank.rank, "/", place.rank.rank,
                      ".sock");
}

}  // namespace

Supervisor::Supervisor(const WorkerSettings& settings, const sigset_t& signals, Place* place,
                       launcher::Janitor* janitor)
    : settings_(settings), place_(place), janitor_(janitor) {
  signal_fd_ = signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK);
  notice_fd_ = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  LRMOE_CHECK_GE(signal_fd_, 0);
  LRMOE_CHECK_GE(notice_fd_, 0);
  if (place_->runtime)
    launcher_fd_ = static_cast<int>(
        syscall(SYS_pidfd_open, getppid(), 0));  // -1: it is gone already, or no such call: not watched
}

Supervisor::~Supervisor() {
  for (int fd : {signal_fd_, notice_fd_, launcher_fd_}) {
    if (fd >= 0) close(fd);
  }
}

int Supervisor::Run() {
  if (const absl::Status status = Start(); !status.ok()) {
    End({.exit_status = kExitFailed, .reason = std::string(status.message())});
  }
  Loop();
  ShutDown();
  if (orderly_) return kExitDone;
  if (ending_->exit_status == kExitEpochAborted) LetTheCauseEndFirst();
  return ending_->exit_status;
}

// mpirun's status is that of the first rank to end badly, and it ends the others then. The status of the rank
// that is the cause says more than this one's.
void Supervisor::LetTheCauseEndFirst() {
  if (launcher_fd_ < 0) return;
  pollfd waits[] = {{signal_fd_, POLLIN, 0}, {launcher_fd_, POLLIN, 0}};
  (void)poll(waits, std::size(waits), static_cast<int>(kCauseFirst.count()));
}

absl::Status Supervisor::Start() {
  StartSession();
  service_ = std::make_unique<worker::WorkerService>(MakeServiceOptions());
  LRMOE_RETURN_IF_ERROR(StartServer());
  return settings_.command.empty() ? absl::OkStatus() : StartTrainer();
}

void Supervisor::StartSession() {
  const bool packs = settings_.packed_weights == "auto" && place_->device == kCpuDevice;
  agent::Options options;
  options.controller = settings_.controller;
  options.controller_timeout_us = settings_.controller_timeout.count() * 1000;
  options.hello = {.rank_idx = place_->rank.rank,
                   .world_size = place_->rank.size,
                   .job = place_->job,
                   .node = place_->node,
                   .device = place_->device_name(),
                   .memory_budget_bytes = settings_.memory_budget_bytes,
                   .replica_slots = settings_.replica_slots,
                   .version = std::string(Version()),
                   .recompute_activation = RecomputesActivation(settings_),
                   .packs_bf16_weights = packs && kernels::CpuPacksWeights(kernels::Type::kBf16),
                   .packs_fp32_weights = packs && kernels::CpuPacksWeights(kernels::Type::kFp32),
                   .optimizer_on_device = HoldsOptimizerOnDevice(settings_)};
  options.seed = std::hash<std::string>()(place_->job) + static_cast<uint64_t>(place_->rank.rank);
  session_ = std::make_unique<worker::ControllerSession>(
      std::move(options),
      worker::ControllerSession::Callbacks{
          .ended =
              [this](agent::EndKind kind, const std::string& reason) {
                place_->transport->Abort(reason);
                const bool lost = kind != agent::EndKind::kAborted;
                Notify(EpochEnded{lost ? kExitControllerLost : kExitEpochAborted, reason, false});
              },
          .drain_asked = [this](const std::string& reason) { Notify(DrainAsked{reason}); }});
}

worker::ServiceOptions Supervisor::MakeServiceOptions() {
  engine::EngineOptions engine_options;
  engine_options.num_threads = place_->threads;
  engine_options.overlap = place_->overlap;
  if (settings_.memory_budget_bytes > 0) engine_options.memory_budget_bytes = settings_.memory_budget_bytes;
  engine_options.collective_timeout = settings_.collective_timeout;
  engine_options.plan_timeout = settings_.plan_timeout;
  engine_options.recompute_activation = RecomputesActivation(settings_);
  engine_options.pack_weights = settings_.packed_weights == "auto";
  engine_options.optimizer_on_device = HoldsOptimizerOnDevice(settings_);
  worker::ServiceOptions options;
  options.rank = place_->rank.rank;
  options.world_size = place_->rank.size;
  options.arena_limits.max_total_bytes =
      settings_.arena_memory_bytes > 0 ? settings_.arena_memory_bytes : worker::PhysicalMemoryBytes();
  options.event_timeout = settings_.collective_timeout;
  options.version = std::string(Version());
  options.create_engine = [this, engine_options](const ModelSpec& model) {
    engine::EngineOptions with_model = engine_options;
    with_model.model = model;
    absl::StatusOr<std::unique_ptr<kernels::Device>> device = nullptr;
    if (place_->device != kCpuDevice) device = MakeDevice(place_->device);
    return CreateEngine(with_model, place_->transport.get(), session_.get(), std::move(device));
  };
  options.on_model = [this](const ModelSpec& model) { session_->SetModel(model); };
  options.on_closed = [](const std::string& client) { LogInfo("client \"", client, "\" is gone"); };
  options.on_dead = [this](const absl::Status& status) {
    Notify(EpochEnded{kExitEpochAborted, std::string(status.message()), true});
  };
  return options;
}

absl::Status Supervisor::StartServer() {
  const std::string rank = absl::StrCat(place_->rank.rank);
  const bool own_directory = settings_.socket.empty();
  const std::string path =
      own_directory ? DefaultSocket(*place_) : absl::StrReplaceAll(settings_.socket, {{"{rank}", rank}});
  if (!own_directory && place_->rank.local_size > 1 && path == settings_.socket) {
    return absl::InvalidArgumentError(absl::StrCat("socket is \"", path, "\", but ", place_->rank.local_size,
                                                   " ranks share this host; use {rank} in it"));
  }
  // Before they exist, so that they never stay.
  if (const std::string lane = worker::SocketServer::LanePath(path); !lane.empty())
    LRMOE_RETURN_IF_ERROR(janitor_->RemoveAtEnd(lane, false));
  LRMOE_RETURN_IF_ERROR(janitor_->RemoveAtEnd(path, own_directory));
  LRMOE_ASSIGN_OR_RETURN(server_, worker::SocketServer::Start(path, service_.get()));
  LogInfo("rank ", rank, " of ", place_->rank.size, " serves ", path);
  return absl::OkStatus();
}

absl::Status Supervisor::StartTrainer() {
  const std::string path =
      settings_.socket.empty()
          ? DefaultSocket(*place_)
          : absl::StrReplaceAll(settings_.socket, {{"{rank}", absl::StrCat(place_->rank.rank)}});
  const std::vector<std::string> environment =
      launcher::TrainerEnvironment(environ, {.socket = path,
                                             .rank = place_->rank.rank,
                                             .world_size = place_->rank.size,
                                             .local_rank = place_->rank.local_rank,
                                             .local_world_size = place_->rank.local_size,
                                             .master_addr = place_->master_addr,
                                             .master_port = place_->master_port});
  return janitor_->Launch(environment);
}

void Supervisor::Notify(Notice notice) {
  {
    std::lock_guard lock(mutex_);
    notices_.push_back(std::move(notice));
  }
  const uint64_t one = 1;
  (void)!write(notice_fd_, &one, sizeof(one));
}

void Supervisor::Loop() {
  while (!Over()) {
    pollfd waits[] = {{signal_fd_, POLLIN, 0},
                      {janitor_died_ ? -1 : janitor_->fd(), POLLIN, 0},
                      {notice_fd_, POLLIN, 0},
                      {launcher_fd_, POLLIN, 0}};
    if (poll(waits, std::size(waits), TimeoutMs()) < 0 && errno != EINTR) {
      return End({.reason = absl::StrCat("poll: ", strerror(errno))});
    }
    // The training process's end before the notices: it is the cause when both are there.
    if (waits[0].revents != 0) OnSignal();
    if (waits[1].revents != 0) OnJanitor();
    if (waits[2].revents != 0) OnNotices();
    if (waits[3].revents != 0) OnLauncherDeath();
    Escalate();
  }
}

bool Supervisor::Over() const {
  if (orderly_) return true;
  if (!ending_) return false;
  if (trainer_ != 0) return false;
  // A client that was not launched here gets its time, too.
  return !settings_.command.empty() || escalation_ > 0 || !service_ || !service_->attached();
}

int Supervisor::TimeoutMs() const {
  if (!next_step_) return -1;
  const auto left = std::chrono::ceil<milliseconds>(*next_step_ - steady_clock::now());
  return static_cast<int>(std::max<int64_t>(left.count(), 0));
}

void Supervisor::OnSignal() {
  signalfd_siginfo info;
  while (read(signal_fd_, &info, sizeof(info)) == sizeof(info)) {
    const int signal = static_cast<int>(info.ssi_signo);
    LogWarning("received ", strsignal(signal),
               trainer_ != 0 ? ", passing it on to the training process" : "");
    if (trainer_ != 0) janitor_->Signal(signal);
    if (got_signal_ != 0) continue;
    got_signal_ = signal;
    if (trainer_ == 0) {
      End({.exit_status = kExitSignalBase + signal,
           .reason =
               absl::StrCat("the worker of rank ", place_->rank.rank, " received ", strsignal(signal))});
    } else if (!ending_) {
      next_step_ = steady_clock::now() + kStopGrace;
    }
  }
}

void Supervisor::OnJanitor() {
  const launcher::JanitorEvent event = janitor_->ReadEvent();
  const std::string of_rank = absl::StrCat("training process of rank ", place_->rank.rank);
  if (const auto* started = std::get_if<launcher::TrainerStarted>(&event)) {
    trainer_ = started->pid;
    LogInfo(of_rank, " started (pid ", trainer_, ")");
    if (got_signal_ != 0) janitor_->Signal(got_signal_);
  } else if (const auto* not_started = std::get_if<launcher::TrainerNotStarted>(&event)) {
    End({.exit_status = not_started->error == ENOENT ? kExitNotFound : kExitCannotExecute,
         .reason = absl::StrCat(of_rank, ": cannot start \"", settings_.command.front(),
                                "\": ", strerror(not_started->error))});
  } else if (const auto* ended = std::get_if<launcher::TrainerEnded>(&event)) {
    OnTrainerEnded(*ended);
  } else {
    trainer_ = 0;
    janitor_died_ = true;
    End({.reason = absl::StrCat("the janitor process of rank ", place_->rank.rank, " (pid ", janitor_->pid(),
                                ") died")});
  }
}

void Supervisor::OnTrainerEnded(const launcher::TrainerEnded& ended) {
  const std::string what =
      absl::StrCat("training process of rank ", place_->rank.rank, " (pid ", trainer_, ") ", Describe(ended));
  trainer_ = 0;
  const int status = ExitStatus(ended);
  if (ending_) {
    LogInfo(what);
  } else if (status == 0) {
    LogInfo(what);
    Finish();
  } else {
    End({.exit_status = status, .reason = what});
  }
}

void Supervisor::Finish() {
  next_step_.reset();
  // The other ranks' training processes may take their time; the loop goes on meanwhile.
  finishing_ = std::thread([this] { Notify(Finished{service_->Finish()}); });
}

void Supervisor::OnNotices() {
  uint64_t count = 0;
  (void)!read(notice_fd_, &count, sizeof(count));
  std::deque<Notice> notices;
  {
    std::lock_guard lock(mutex_);
    notices.swap(notices_);
  }
  for (Notice& notice : notices) {
    if (auto* ended = std::get_if<EpochEnded>(&notice)) {
      End({ended->exit_status, std::move(ended->reason), ended->tell_controller});
    } else if (auto* drain = std::get_if<DrainAsked>(&notice)) {
      LogWarning("the controller asks to leave: ", drain->reason,
                 trainer_ != 0 ? "; the training process gets SIGTERM" : "");
      if (trainer_ != 0) janitor_->Signal(SIGTERM);
    } else if (std::get<Finished>(notice).status.ok() && !ending_) {
      LogInfo("finished with all ranks");
      session_->Leave({});
      orderly_ = true;
    } else if (!ending_) {
      End({.exit_status = kExitEpochAborted,
           .reason = std::string(std::get<Finished>(notice).status.message())});
    }
  }
}

void Supervisor::OnLauncherDeath() {
  const int fd = std::exchange(launcher_fd_, -1);
  close(fd);
  End({.exit_status = kExitLauncherLost,
       .reason = absl::StrCat("the MPI launcher of rank ", place_->rank.rank, " died")});
}

void Supervisor::End(Ending ending) {
  if (ending_ || orderly_) return;
  LogError(ending.reason);
  ending_ = std::move(ending);
  place_->transport->Abort(ending_->reason);
  if (service_) service_->EndEpoch(ending_->reason);
  if (ending_->tell_controller && session_) session_->Leave({.reason = ending_->reason, .failed = true});
  // A dead epoch's training process learns it from its next call; time to say so before it is ended.
  next_step_ = steady_clock::now() + kLinger;
}

void Supervisor::Escalate() {
  if (!next_step_ || steady_clock::now() < *next_step_) return;
  next_step_.reset();
  if (!ending_) {  // kStopGrace after a SIGTERM
    return End({.exit_status = kExitSignalBase + got_signal_,
                .reason = absl::StrCat("training process of rank ", place_->rank.rank, " (pid ", trainer_,
                                       ") went on after ", strsignal(got_signal_))});
  }
  ++escalation_;
  if (trainer_ == 0) return;
  if (escalation_ == 1) {
    LogWarning("ending the training process (pid ", trainer_, ")");
    janitor_->Signal(SIGTERM);
    next_step_ = steady_clock::now() + kTerminateGrace;
  } else {
    janitor_->Signal(SIGKILL);
    next_step_ = steady_clock::now() + kTerminateGrace;
    // The kernel ends it as soon as it can; the janitor waits for that, not this loop.
    if (escalation_ > 2) trainer_ = 0;
  }
}

void Supervisor::ShutDown() {
  g_hard_exit_status = orderly_ ? kExitDone : ending_->exit_status;
  ::signal(SIGALRM, ExitHard);
  alarm(kMaxShutDownSeconds);
  if (server_) server_->SetUnhealthy();
  if (service_) {
    if (orderly_) service_->EndEpoch("the worker has finished");
    service_->Stop();
  }
  if (finishing_.joinable()) finishing_.join();
  if (server_) server_->Shutdown(kServerGrace);
  session_.reset();
  server_.reset();
  service_.reset();
  alarm(0);
}

}  // namespace lrmoe
