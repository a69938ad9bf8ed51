#include "worker/settings.h"

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/logging.h"
#include "worker/backend.h"
#include "worker/device_choice.h"

namespace lrmoe {

void AddWorkerSettings(WorkerSettings* settings, Settings* parser) {
  using std::chrono::hours;
  using std::chrono::milliseconds;
  parser->AddString("controller", &settings->controller, "Address of lrmoe-controller, host:port.");
  parser->Require("controller");
  parser->AddString(
      "device", &settings->device,
      "Where experts are computed: cpu, cuda:N, or auto: the CUDA device of the local rank, else the CPU.");
  parser->AddString("transport", &settings->transport,
                    "How ranks exchange rows: mpi, inproc (one rank), nccl (CUDA devices; started by MPI), "
                    "or auto: nccl or "
                    "mpi under an MPI launcher.");
  parser->AddBytes("memory_budget", &settings->memory_budget_bytes, {0, INT64_MAX},
                   "Memory for experts, replicas and saved rows of all layers on this rank; 0: unlimited.");
  parser->AddInt("replica_slots", &settings->replica_slots, {0, 4096},
                 "Replicas of other ranks' experts this rank may hold, per layer.");
  parser->AddString(
      "socket", &settings->socket,
      "Unix socket for the training process; {rank} is replaced. Default: 0.sock, 1.sock, ... in a new "
      "directory of $XDG_RUNTIME_DIR or /tmp.");
  parser->AddInt("threads", &settings->threads, {0, 256},
                 "Compute threads; 0: this rank's share of the cores it may run on.");
  parser->AddString("activation_memory", &settings->activation_memory,
                    "save: keep FC1 outputs for the backward pass; recompute: make them again from the "
                    "saved rows, less memory for a third forward GEMM. Equal on all ranks.");
  parser->AddString(
      "packed_weights", &settings->packed_weights,
      "auto: where the device multiplies packed weights faster, hold them packed for the forward "
      "and for the backward pass, twice their size; off: as they are. Equal on all ranks.");
  parser->AddString(
      "optimizer_state", &settings->optimizer_state,
      "Where fp32 masters and moments of the owned experts are kept and updated: host, or device: 12 bytes "
      "per parameter of its memory, which count in memory_budget, and no copies per step (CUDA only). "
      "Equal on all ranks.");
  parser->AddString("overlap", &settings->overlap,
                    "auto: ranks exchange rows while they compute where all of them have somebody for it, a "
                    "device or more cores than compute threads; on: also without; off: never.");
  parser->AddBytes("arena_memory", &settings->arena_memory_bytes, {0, INT64_MAX},
                   "Shared memory the training process may ask for; 0: the machine's memory.");
  parser->AddDuration("controller_timeout", &settings->controller_timeout, {milliseconds(100), hours(1)},
                      "Without a connection to the controller for this long the worker ends.");
  parser->AddDuration("plan_timeout", &settings->plan_timeout, {milliseconds(10), hours(24)},
                      "A plan must come within this once all ranks are at the layer.");
  parser->AddDuration(
      "collective_timeout", &settings->collective_timeout, {milliseconds(10), hours(24)},
      "How long ranks wait for each other in one exchange; also for a slower training process.");
  parser->AddChoice("log_level", &settings->log_level, LogLevelNames(), "Least level that is logged.");
  parser->AllowCommand(
      &settings->command,
      "The training process of this rank, started with LRMOE_SOCKET, RANK, WORLD_SIZE, LOCAL_RANK, "
      "LOCAL_WORLD_SIZE, MASTER_ADDR, MASTER_PORT. "
      "Exit status: the training process's (128 + N: killed by signal N, 127: not found, 126: cannot "
      "execute); 0 done, 1 failed, 2 usage, 3 a peer or the controller ended the epoch, 4 controller "
      "lost or refusing, 5 MPI launcher lost.");
}

namespace {

absl::Status Refuse(absl::string_view name, absl::string_view value, absl::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat(name, " is \"", value, "\"; allowed: ", allowed));
}

absl::Status ValidateController(const std::string& controller) {
  if (absl::StartsWith(controller, "unix:/")) return absl::OkStatus();
  const size_t colon = controller.rfind(':');
  int port = 0;
  if (colon != std::string::npos && colon > 0 && absl::SimpleAtoi(controller.substr(colon + 1), &port) &&
      port >= 1 && port <= 65535) {
    return absl::OkStatus();
  }
  return Refuse("controller", controller, "host:port with a port of 1..65535");
}

}  // namespace

absl::Status CheckOptimizerState(const WorkerSettings& settings, bool cpu) {
  if (!cpu || !HoldsOptimizerOnDevice(settings)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "optimizer_state is \"device\" on the CPU, whose memory is the host's; allowed: host");
}

absl::Status Validate(const WorkerSettings& settings) {
  if (absl::Status status = ValidateController(settings.controller); !status.ok()) return status;
  if (absl::Status status = CheckDeviceName(settings.device); !status.ok()) return status;
  if (absl::StartsWith(settings.device, "cuda") && !BuiltWithCuda()) {
    return absl::UnimplementedError(absl::StrCat(
        "device is \"", settings.device, "\"; this worker is built without CUDA, allowed: auto, cpu"));
  }
  if (settings.transport == "nccl" && !BuiltWithNccl()) {
    return absl::UnimplementedError(
        "transport is \"nccl\"; this worker is built without NCCL, allowed: auto, mpi, inproc");
  }
  if (settings.transport != "auto" && settings.transport != "mpi" && settings.transport != "inproc" &&
      settings.transport != "nccl") {
    return Refuse("transport", settings.transport, "auto, mpi, inproc, nccl");
  }
  if (settings.activation_memory != "save" && settings.activation_memory != "recompute")
    return Refuse("activation_memory", settings.activation_memory, "save, recompute");
  if (settings.packed_weights != "auto" && settings.packed_weights != "off")
    return Refuse("packed_weights", settings.packed_weights, "auto, off");
  if (settings.optimizer_state != "host" && settings.optimizer_state != "device")
    return Refuse("optimizer_state", settings.optimizer_state, "host, device");
  if (absl::Status status = CheckOptimizerState(settings, settings.device == "cpu"); !status.ok())
    return status;
  if (settings.overlap != "auto" && settings.overlap != "on" && settings.overlap != "off")
    return Refuse("overlap", settings.overlap, "auto, on, off");
  if (!settings.socket.empty() && settings.socket.front() != '/') {
    return Refuse("socket", settings.socket, "an absolute path");
  }
  return absl::OkStatus();
}

}  // namespace lrmoe
