#include "worker/launcher/environment.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace lrmoe::launcher {
namespace {

constexpr const char* kPrefixes[] = {"OMPI_",  "OPAL_", "ORTE_",      "PRTE_",       "PMIX_",    "PMI_",
                                     "HYDRA_", "MPIR_", "SLURM_STEP", "SLURM_SRUN_", "SLURM_PMI"};
constexpr const char* kNames[] = {
    "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID",         "SLURM_GTIDS",    "SLURM_TASK_PID",
    "SLURM_NTASKS", "SLURM_NPROCS",  "SLURM_TASKS_PER_NODE", "SLURM_MPI_TYPE", "SLURM_LAUNCH_NODE_IPADDR"};

}  // namespace

bool IsLauncherVariable(absl::string_view name) {
  return std::any_of(std::begin(kPrefixes), std::end(kPrefixes),
                     [name](const char* prefix) { return absl::StartsWith(name, prefix); }) ||
         std::any_of(std::begin(kNames), std::end(kNames),
                     [name](const char* whole) { return name == whole; });
}

std::vector<std::string> TrainerEnvironment(const char* const* inherited, const RankEnvironment& rank) {
  const std::pair<const char*, std::string> set[] = {
      {"LRMOE_SOCKET", rank.socket},
      {"RANK", absl::StrCat(rank.rank)},
      {"WORLD_SIZE", absl::StrCat(rank.world_size)},
      {"LOCAL_RANK", absl::StrCat(rank.local_rank)},
      {"LOCAL_WORLD_SIZE", absl::StrCat(rank.local_world_size)},
      {"MASTER_ADDR", rank.master_addr},
      {"MASTER_PORT", absl::StrCat(rank.master_port)},
  };
  std::vector<std::string> environment;
  for (; *inherited != nullptr; ++inherited) {
    const absl::string_view entry(*inherited);
    const absl::string_view name = entry.substr(0, entry.find('='));
    const bool replaced = std::any_of(std::begin(set), std::end(set),
                                      [name](const auto& variable) { return name == variable.first; });
    if (!replaced && !IsLauncherVariable(name)) environment.emplace_back(*inherited);
  }
  for (const auto& [name, value] : set) environment.push_back(absl::StrCat(name, "=", value));
  return environment;
}

}  // namespace lrmoe::launcher
