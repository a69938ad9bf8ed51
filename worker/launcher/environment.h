// The environment of a launched training process: what torchrun would set, without what the MPI launcher set
// for the worker (a training process that finds OMPI_* or PMIX_* may try to join the worker's MPI job).
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace lrmoe::launcher {

struct RankEnvironment {
  std::string socket;  // LRMOE_SOCKET
  int32_t rank = 0;
  int32_t world_size = 1;
  int32_t local_rank = 0;
  int32_t local_world_size = 1;
  std::string master_addr;  // where rank 0's training process listens
  int32_t master_port = 0;
};

// Variables that belong to the worker's own launch and are removed:
//   every OMPI_*, OPAL_*, ORTE_*, PRTE_*, PMIX_*, PMI_*, HYDRA_*, MPIR_*;
//   of Slurm only those of the job step, which describe the worker's place in it: SLURM_STEP*, SLURM_SRUN_*,
//   SLURM_PMI*, SLURM_PROCID, SLURM_LOCALID, SLURM_NODEID, SLURM_GTIDS, SLURM_TASK_PID, SLURM_NTASKS,
//   SLURM_NPROCS, SLURM_TASKS_PER_NODE, SLURM_MPI_TYPE, SLURM_LAUNCH_NODE_IPADDR. Those of the job stay.
bool IsLauncherVariable(absl::string_view name);

// "NAME=value" entries: `inherited` (null-terminated, as environ) without launcher variables and without the
// seven of RankEnvironment, then those seven.
std::vector<std::string> TrainerEnvironment(const char* const* inherited, const RankEnvironment& rank);

}  // namespace lrmoe::launcher
