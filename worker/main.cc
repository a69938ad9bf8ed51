// lrmoe-worker: one rank's experts. Order matters here: the janitor is forked while the process has one
// thread and none of MPI's or gRPC's files; signals are blocked before any other thread exists.
#include <signal.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/logging.h"
#include "worker/launcher/janitor.h"
#include "worker/place.h"
#include "worker/settings.h"
#include "worker/supervisor.h"

namespace lrmoe {
namespace {

int Fail(const absl::Status& status) {
  LogError(std::string(status.message()));
  return kExitFailed;
}

int Run(const WorkerSettings& settings, const sigset_t& signals) {
  auto janitor = launcher::Janitor::Start(settings.command);
  if (!janitor.ok()) return Fail(janitor.status());
  auto place = FindPlace(settings);
  if (!place.ok()) return Fail(place.status());
  SetLogRank(place->rank.rank);
  if (const absl::Status named = (*janitor)->SetName(absl::StrCat("lrmoe-worker[", place->rank.rank, "]"));
      !named.ok()) {
    return Fail(named);
  }
  // MPI_Finalize removes these, mpirun those of dead ranks; the janitor, when mpirun is gone too.
  const std::vector<std::string> shared_memory = MappedSharedMemory();
  for (const std::string& file : shared_memory) {
    if (const absl::Status told = (*janitor)->RemoveAtEnd(file, false); !told.ok()) return Fail(told);
  }
  const int status = std::make_unique<Supervisor>(settings, signals, &*place, janitor->get())->Run();
  if (status == kExitDone) {
    for (const std::string& file : shared_memory) (void)(*janitor)->KeepAtEnd(file);
  }
  janitor->reset();  // kills what is left of the training process
  if (status != kExitDone) {
    // Finalizing MPI waits for ranks that may be gone; not finalizing makes mpirun end the job.
    std::fflush(nullptr);
    _exit(status);
  }
  return kExitDone;  // destroys transport and runtime: MPI_Finalize
}

}  // namespace
}  // namespace lrmoe

int main(int argc, char** argv) {
  lrmoe::WorkerSettings settings;
  lrmoe::Settings parser("lrmoe-worker",
                         "Owns a shard of the experts on this rank and executes the controller's plans.");
  lrmoe::AddWorkerSettings(&settings, &parser);
  if (const std::optional<int> status = parser.Parse(argc, argv)) return *status;
  const absl::Status logging = lrmoe::StartLogging("lrmoe-worker", settings.log_level);
  const absl::Status valid = logging.ok() ? Validate(settings) : logging;
  if (!valid.ok()) {
    std::fprintf(stderr, "lrmoe-worker: %s\n", std::string(valid.message()).c_str());
    return lrmoe::kExitUsage;
  }
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGINT);
  sigaddset(&signals, SIGTERM);
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  return lrmoe::Run(settings, signals);
}
