// The settings of lrmoe-worker: flag, then LRMOE_* variable, then --config file, then default.
#pragma once

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/config.h"

namespace lrmoe {

// Exit statuses beyond those of every program (common/config.h). With a training process, its own status
// comes first.
inline constexpr int kExitEpochAborted = 3;    // a peer, the transport or the controller ended the epoch
inline constexpr int kExitControllerLost = 4;  // no session for controller_timeout, or it refused this worker
inline constexpr int kExitLauncherLost = 5;    // mpirun (or its daemon) died
inline constexpr int kExitCannotExecute = 126;  // of the training process, as a shell says it
inline constexpr int kExitNotFound = 127;
inline constexpr int kExitSignalBase = 128;  // + signal that ended the training process or the worker

struct WorkerSettings {
  std::string controller;                  // host:port
  std::string device = "auto";             // auto | cpu | cuda:N
  std::string transport = "auto";          // auto | mpi | inproc | nccl
  int64_t memory_budget_bytes = 0;         // over all layers; 0: unlimited
  int32_t replica_slots = 1;               // per layer
  std::string socket;                      // empty: a new directory; {rank} is replaced
  int32_t threads = 0;                     // 0: this rank's share of the cores
  std::string activation_memory = "save";  // save | recompute
  std::string packed_weights = "auto";     // auto | off
  std::string optimizer_state = "host";    // host | device
  std::string overlap = "auto";            // auto | on | off
  int64_t arena_memory_bytes = 0;          // 0: physical memory of the machine
  std::chrono::milliseconds controller_timeout{5000};
  std::chrono::milliseconds plan_timeout{60000};
  std::chrono::milliseconds collective_timeout{300000};
  std::string log_level = "info";
  std::vector<std::string> command;  // of the training process; empty: serve whoever attaches
};

void AddWorkerSettings(WorkerSettings* settings, Settings* parser);
// What one setting alone cannot tell: values of parts that are not built, and forms. InvalidArgument,
// Unimplemented.
absl::Status Validate(const WorkerSettings& settings);
// What the setting asks for and a device can give. InvalidArgument.
absl::Status CheckOptimizerState(const WorkerSettings& settings, bool cpu);
// Masters and moments of the owned experts lie in the device's memory.
inline bool HoldsOptimizerOnDevice(const WorkerSettings& settings) {
  return settings.optimizer_state == "device";
}
// FC1 rows are not kept for the backward pass but made again.
inline bool RecomputesActivation(const WorkerSettings& settings) {
  return settings.activation_memory == "recompute";
}

}  // namespace lrmoe
