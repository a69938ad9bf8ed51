// lrmoe-controller: puts planner, core, loop and gRPC together, and ends them in order.
#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/deadline.h"
#include "common/freed_memory.h"
#include "common/logging.h"
#include "common/version.h"
#include "controller/planner/planner.h"
#include "controller/rpc/listener.h"
#include "controller/server.h"
#include "controller/settings.h"
#include "controller/store/store.h"

namespace lrmoe {
namespace {

// Whoever reads the file reads all of it: it appears by a rename.
absl::Status WritePortFile(const std::string& path, const std::string& address) {
  const std::string partial = absl::StrCat(path, ".", getpid());
  std::ofstream file(partial);
  file << address << "\n";
  file.close();
  if (!file || std::rename(partial.c_str(), path.c_str()) != 0)
    return absl::PermissionDeniedError(absl::StrCat("port_file is \"", path, "\"; cannot be written"));
  return absl::OkStatus();
}

int Fail(const absl::Status& status) {
  LogError(std::string(status.message()));
  return kExitFailed;
}

// How long the end may take to write what waits for the disk.
constexpr auto kCloseLimit = std::chrono::seconds(10);

int Run(ControllerSettings settings, const sigset_t& signals) {
  std::unique_ptr<store::Store> store;
  if (!settings.state_dir.empty()) {
    auto opened = store::Store::Open({.directory = settings.state_dir}, &settings.server.core.policy);
    if (!opened.ok()) return Fail(opened.status());
    store = *std::move(opened);
  }
  Server server(settings.server, planner::Plan, store.get());
  if (store != nullptr) {
    const absl::Status restored = server.Restore();
    if (!restored.ok()) return Fail(restored);
  }
  absl::StatusOr<std::unique_ptr<rpc::Listener>> listener = rpc::Listener::Start(settings.listener, &server);
  if (!listener.ok()) return Fail(listener.status());
  std::printf("lrmoe-controller %s listening on %s\n", std::string(Version()).c_str(),
              (*listener)->address().c_str());
  std::fflush(stdout);
  if (!settings.port_file.empty()) {
    const absl::Status written = WritePortFile(settings.port_file, (*listener)->address());
    if (!written.ok()) return Fail(written);
  }
  int signal = 0;
  sigwait(&signals, &signal);
  LogInfo("stopping: ", signal == SIGTERM ? "SIGTERM" : "SIGINT");
  (*listener)->Stop(absl::StrCat("controller stopping (", signal == SIGTERM ? "SIGTERM" : "SIGINT", ")"));
  if (!settings.port_file.empty()) unlink(settings.port_file.c_str());
  if (store == nullptr) return kExitDone;
  const absl::Status closed = store->Close(After(kCloseLimit));
  if (closed.ok()) return kExitDone;
  LogError(std::string(closed.message()));
  std::_Exit(kExitFailed);  // its thread cannot be waited for
}

}  // namespace
}  // namespace lrmoe

int main(int argc, char** argv) {
  lrmoe::KeepFreedMemory();
  // Before any thread exists, so that all of them leave these signals to sigwait.
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);

  lrmoe::ControllerSettings settings;
  lrmoe::Settings parser("lrmoe-controller",
                         "Plans the expert work of one training job and answers lrmoectl.");
  lrmoe::AddControllerSettings(&settings, &parser);
  if (const std::optional<int> status = parser.Parse(argc, argv)) return *status;
  const absl::Status logging = lrmoe::StartLogging("lrmoe-controller", settings.log_level);
  const absl::Status valid = logging.ok() ? Validate(settings) : logging;
  if (!valid.ok()) {
    std::fprintf(stderr, "lrmoe-controller: %s\n", std::string(valid.message()).c_str());
    return lrmoe::kExitUsage;
  }
  return lrmoe::Run(settings, signals);
}
