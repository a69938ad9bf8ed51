#include "worker/place.h"

#include <netinet/in.h>
#include <sched.h>
#include <sys/random.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <set>
#include <span>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "worker/backend.h"
#include "worker/overlap_choice.h"
#include "worker/transport/inproc.h"

namespace lrmoe {
namespace {

// What rank 0 tells the others. Plain bytes: all ranks run the same program.
struct Shared {
  char job[40] = {};
  char master_addr[256] = {};
  int32_t master_port = 0;
};

std::string HostName() {
  char name[256] = {};
  if (gethostname(name, sizeof(name) - 1) != 0 || name[0] == '\0') return "localhost";
  return name;
}

std::string RandomName() {
  char bytes[8];
  LRMOE_CHECK_EQ(getrandom(bytes, sizeof(bytes), 0), static_cast<ssize_t>(sizeof(bytes)));
  return absl::BytesToHexString(absl::string_view(bytes, sizeof(bytes)));
}

// A TCP port that nobody uses now. Rank 0's training process listens on it later, as with torchrun.
absl::StatusOr<int32_t> FreePort() {
  const int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t size = sizeof(address);
  const bool found = fd >= 0 && bind(fd, reinterpret_cast<sockaddr*>(&address), size) == 0 &&
                     getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0;
  const int error = errno;
  if (fd >= 0) close(fd);
  if (!found) return absl::UnavailableError(absl::StrCat("no free TCP port: ", std::strerror(error)));
  return ntohs(address.sin_port);
}

// Cores this rank may run on: no more than its share of the host.
int32_t CoresOf(const transport::MpiPlace& rank) {
  cpu_set_t allowed;
  CPU_ZERO(&allowed);
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return 1;
  const auto online = static_cast<int32_t>(sysconf(_SC_NPROCESSORS_ONLN));
  return std::max(1, std::min(CPU_COUNT(&allowed), online / rank.local_size));
}

// Whether all ranks exchange rows while they compute: they do the same, in the same order.
absl::Status AgreeOnOverlap(const WorkerSettings& settings, const OverlapFacts& facts, Place* place) {
  std::string reason;
  const bool wanted = ChooseOverlap(settings.overlap, facts, &reason);
  int64_t all = wanted ? 1 : 0;
  const transport::Call call{"choice of overlap", {}, After(settings.collective_timeout)};
  LRMOE_RETURN_IF_ERROR(place->transport->AllReduce(call, std::span(&all, 1), transport::Reduction::kMin));
  place->overlap = all == 1;
  if (wanted && !place->overlap) reason = "another rank does not want to";
  LogInfo("exchanges rows ", place->overlap ? "while it computes (" : "between computations (", reason, ")");
  return absl::OkStatus();
}

// This rank's device, and that the ranks' choices fit together; then a transport that reaches device memory.
absl::Status ChoosePlaceOfWork(const WorkerSettings& settings, Place* place) {
  const kernels::cuda::Inventory inventory =
      settings.device == "cpu" ? kernels::cuda::Inventory{} : LookForDevices();
  std::string reason;
  LRMOE_ASSIGN_OR_RETURN(place->device, ChooseDevice(settings.device, place->rank.local_rank,
                                                     place->rank.local_size, inventory, &reason));
  if (settings.device == "auto" && place->device != kCpuDevice && place->rank.size > 1 && !BuiltWithNccl()) {
    reason = "this worker is built without NCCL";
    place->device = kCpuDevice;
  }
  DeviceClaim mine;
  mine.ordinal = place->device;
  place->node.copy(mine.node, sizeof(mine.node) - 1);
  if (place->device != kCpuDevice) inventory.devices[place->device].uuid.copy(mine.uuid, sizeof(mine.uuid));
  std::vector<DeviceClaim> claims(place->rank.size);
  const transport::Call call{"choice of devices", {}, After(settings.collective_timeout)};
  LRMOE_RETURN_IF_ERROR(place->transport->AllGather(call, std::as_bytes(std::span(&mine, 1)),
                                                    std::as_writable_bytes(std::span(claims))));
  LRMOE_RETURN_IF_ERROR(CheckClaims(claims));
  LogInfo("computes on ", place->device_name(), " (", reason, ")");
  LRMOE_RETURN_IF_ERROR(CheckOptimizerState(settings, place->device == kCpuDevice));
  if (place->device == kCpuDevice) {
    if (settings.transport != "nccl") return absl::OkStatus();
    return absl::InvalidArgumentError(
        absl::StrCat("transport is \"nccl\", which needs a CUDA device per rank: ", reason));
  }
  if (settings.transport == "mpi" && place->rank.size > 1)
    return absl::InvalidArgumentError(
        absl::StrCat("transport is \"mpi\" and the device ", place->device_name(), "; allowed: auto, nccl"));
  LRMOE_ASSIGN_OR_RETURN(place->transport, ConnectDevices(std::move(place->transport), place->device,
                                                          settings.collective_timeout));
  return absl::OkStatus();
}

}  // namespace

std::string Place::device_name() const {
  return device == kCpuDevice ? "cpu" : absl::StrCat("cuda:", device);
}

std::vector<std::string> MappedSharedMemory() {
  std::set<std::string> files;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) {
    const size_t path = line.find("/dev/shm/");
    if (path != std::string::npos) files.insert(line.substr(path, line.find(' ', path) - path));
  }
  return {files.begin(), files.end()};
}

bool IsLaunchedByMpi() {
  for (const char* name : {"OMPI_COMM_WORLD_SIZE", "PMIX_RANK", "PMI_RANK"}) {
    if (std::getenv(name) != nullptr) return true;
  }
  return false;
}

namespace {

absl::Status Find(const WorkerSettings& settings, Place& place) {
  place.node = HostName();
  const bool mpi = settings.transport == "mpi" || (settings.transport != "inproc" && IsLaunchedByMpi());
  if (mpi) {
    LRMOE_ASSIGN_OR_RETURN(place.runtime, transport::StartMpi());
    place.rank = place.runtime->place();
  }
  const int32_t cores = CoresOf(place.rank);
  place.threads = settings.threads > 0 ? settings.threads : std::min(cores, 256);
  OverlapFacts facts{place.rank.size, false, cores, place.threads};
  if (mpi) {
    std::string reason;
    const transport::MpiOptions options{.progress_thread = ChooseOverlap(settings.overlap, facts, &reason)};
    LRMOE_ASSIGN_OR_RETURN(place.transport, place.runtime->CreateTransport(options));
  } else {
    place.transport = std::move(transport::CreateInprocGroup(1)[0]);
  }
  Shared shared;
  if (place.rank.rank == 0) {
    const bool one_host = place.rank.local_size == place.rank.size;
    RandomName().copy(shared.job, sizeof(shared.job) - 1);
    (one_host ? std::string("127.0.0.1") : place.node)
        .copy(shared.master_addr, sizeof(shared.master_addr) - 1);
    LRMOE_ASSIGN_OR_RETURN(shared.master_port, FreePort());
  }
  const transport::Call call{"start", {}, After(settings.collective_timeout)};
  LRMOE_RETURN_IF_ERROR(place.transport->Broadcast(call, 0, std::as_writable_bytes(std::span(&shared, 1))));
  place.job = shared.job;
  place.master_addr = shared.master_addr;
  place.master_port = shared.master_port;
  LRMOE_RETURN_IF_ERROR(ChoosePlaceOfWork(settings, &place));
  facts.on_device = place.device != kCpuDevice;
  return AgreeOnOverlap(settings, facts, &place);
}

}  // namespace

absl::StatusOr<Place> FindPlace(const WorkerSettings& settings) {
  Place place;
  const absl::Status found = Find(settings, place);
  if (found.ok()) return place;
  // What this rank alone may not do, the others learn now: they wait for it, and MPI_Finalize would for them.
  if (place.transport != nullptr) place.transport->Abort(found.message());
  return found;
}

}  // namespace lrmoe
