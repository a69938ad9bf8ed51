// Where this worker stands: its rank, its transport, and what the ranks of one launch share.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/device_choice.h"
#include "worker/settings.h"
#include "worker/transport/mpi.h"
#include "worker/transport/transport.h"

namespace lrmoe {

struct Place {
  // Order of destruction matters: the transport before the runtime.
  std::unique_ptr<transport::MpiRuntime> runtime;  // null without MPI
  std::unique_ptr<transport::Transport> transport;
  transport::MpiPlace rank;
  int32_t threads = 1;          // that compute
  bool overlap = false;         // rows are exchanged while ranks compute; equal on all ranks
  int32_t device = kCpuDevice;  // or the ordinal of this rank's CUDA device
  std::string node;             // host name of this rank
  std::string job;              // random, equal on all ranks
  std::string master_addr;      // of rank 0, for the training processes
  int32_t master_port = 0;      // free on rank 0's host a moment ago

  std::string device_name() const;  // "cpu", "cuda:1"
};

// Starts MPI when settings and environment say so, chooses a device, agrees with the other ranks. Collective;
// on the main thread.
absl::StatusOr<Place> FindPlace(const WorkerSettings& settings);

// Files of /dev/shm that this process maps: MPI's. MPI removes them when it ends, or mpirun does, unless that
// is killed.
std::vector<std::string> MappedSharedMemory();

// Whether an MPI launcher (mpirun, srun, any PMIx) started this process.
bool IsLaunchedByMpi();

}  // namespace lrmoe
