// NCCL between threads: communicators that never block, groups of sends and receives, abort.
#include <nccl.h>

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "tests/support/fake_cuda/state.h"

namespace lrmoe::fake_cuda {
namespace {

struct World;

// One send or receive; the i-th send to a rank meets its i-th receive.
struct Message {
  bool send;
  int peer;
  std::byte* data;
  int64_t bytes;
  int64_t number = 0;    // among those of its direction to or from this peer
  bool arrived = false;  // the stream has come to it
  bool over = false;
};
// What one group told one communicator: one kernel on one stream.
struct Exchange {
  cudaStream_t stream;
  std::vector<Message> messages;
  std::shared_ptr<Stream> on;  // once it is launched
  uint64_t end = 0;
};

}  // namespace
}  // namespace lrmoe::fake_cuda

struct ncclComm {
  std::shared_ptr<lrmoe::fake_cuda::World> world;
  int rank = 0, device = 0;
  int polls = 0;  // that still find it busy
  ncclResult_t error = ncclSuccess;
  bool aborted = false;
  std::shared_ptr<lrmoe::fake_cuda::Exchange> next;  // told, not launched
  std::vector<std::shared_ptr<lrmoe::fake_cuda::Exchange>> launched;
  std::map<std::pair<bool, int>, int64_t> numbers;  // of messages so far, by direction and peer
  int fails_after = -1, fails_with = 0;
};

namespace lrmoe::fake_cuda {
namespace {

struct World {
  int size = 0;
  std::map<int, std::shared_ptr<ncclComm>> ranks;  // who has come
};

struct NcclState {
  std::map<std::string, std::shared_ptr<World>> worlds;
  std::map<ncclComm_t, std::shared_ptr<ncclComm>> comms;
  int polls = 3, version = NCCL_VERSION_CODE, last_id = 0;
  struct Failure {
    int exchanges, error;
  };
  std::map<int, Failure> failures;  // by rank
};
NcclState& Nccl() {
  static NcclState state;
  return state;
}

struct Group {
  int depth = 0;
  std::map<ncclComm_t, Exchange> told;
};
thread_local Group group;

ncclComm& Known(ncclComm_t comm, const char* function) {
  if (!Nccl().comms.contains(comm)) Misuse(std::string(function) + ": no such communicator, or one aborted");
  return *comm;
}
// Nothing but questions and abort while a communicator is busy.
ncclComm& Idle(ncclComm_t comm, const char* function) {
  ncclComm& idle = Known(comm, function);
  if (idle.polls > 0 || idle.next != nullptr)
    Misuse(std::string(function) + " while the communicator is in progress");
  return idle;
}

bool Complete(const World& world) {
  return static_cast<int>(world.ranks.size()) == world.size;
}

// The other side of a message; null: not told yet, or over.
Message* Partner(ncclComm& comm, const Message& message) {
  const auto peer = comm.world->ranks.find(message.peer);
  if (peer == comm.world->ranks.end() || peer->second->aborted) return nullptr;
  for (const auto& exchange : peer->second->launched)
    for (Message& theirs : exchange->messages)
      if (theirs.send != message.send && theirs.peer == comm.rank && theirs.number == message.number)
        return &theirs;
  return nullptr;
}

void Fail(ncclComm& comm, ncclResult_t error) {
  if (comm.error == ncclSuccess) comm.error = error;
}

// Moves what both sides have come to. Whether the exchange is over.
bool Progress(ncclComm& comm, Exchange& exchange) {
  if (comm.aborted) return true;
  if (comm.error != ncclSuccess) return false;  // its kernel spins until it is aborted
  bool over = true;
  for (Message& message : exchange.messages) {
    message.arrived = true;
    if (message.over) continue;
    Message* const partner = Partner(comm, message);
    if (partner == nullptr || !partner->arrived) {
      over = false;
      continue;
    }
    if (partner->bytes != message.bytes) {
      Fail(comm, ncclInvalidUsage);
      Fail(*comm.world->ranks[message.peer], ncclInvalidUsage);
      return false;
    }
    const Message &from = message.send ? message : *partner, &to = message.send ? *partner : message;
    Touch();
    std::memcpy(to.data, from.data, from.bytes);
    message.over = partner->over = true;
  }
  return over;
}

// The peers' devices come to their messages by themselves, too.
void LetPeersCome(ncclComm& comm) {
  for (const auto& [rank, peer] : std::map(comm.world->ranks))
    if (rank != comm.rank && !peer->aborted)
      for (const auto& exchange : std::vector(peer->launched)) Advance(*exchange->on, exchange->end);
}

void Launch(ncclComm& comm) {
  std::shared_ptr<Exchange> exchange = std::exchange(comm.next, nullptr);
  Stream& stream = fake_cuda::Known(exchange->stream, "NCCL");
  const std::shared_ptr<ncclComm> kept = Nccl().comms.at(&comm);
  exchange->on = stream.shared_from_this();
  for (Message& message : exchange->messages) message.number = comm.numbers[{message.send, message.peer}]++;
  comm.launched.push_back(exchange);
  Enqueue(stream, [kept, exchange] {
    bool over = Progress(*kept, *exchange);
    if (!over) {
      LetPeersCome(*kept);
      over = Progress(*kept, *exchange);
    }
    if (over) std::erase(kept->launched, exchange);
    return over;
  });
  exchange->end = stream.added;
  if (kept->fails_after >= 0 && kept->fails_after-- == 0)
    Fail(*kept, static_cast<ncclResult_t>(kept->fails_with));
}

ncclResult_t Tell(ncclComm_t comm, cudaStream_t stream, const Message& message, const char* function) {
  ncclComm& told = Idle(comm, function);
  if (group.depth == 0) Misuse(std::string(function) + " outside a group; not in this fake");
  if (message.peer < 0 || message.peer >= told.world->size) return ncclInvalidArgument;
  if (fake_cuda::Known(stream, function).device != told.device) return ncclInvalidUsage;
  ExpectOnDevice(message.data, message.bytes, told.device, "what NCCL sends or receives");
  Exchange& exchange = group.told[comm];
  if (!exchange.messages.empty() && exchange.stream != stream)
    Misuse("a group uses several streams; not in this fake");
  exchange.stream = stream;
  exchange.messages.push_back(message);
  return ncclSuccess;
}

}  // namespace

void ResetNccl() {
  Nccl() = NcclState();
}
void SetNcclPolls(int polls) {
  const Lock lock(Mutex());
  Nccl().polls = polls;
}
void SetNcclVersion(int version) {
  const Lock lock(Mutex());
  Nccl().version = version;
}
void FailNccl(int rank, int exchanges, int error) {
  const Lock lock(Mutex());
  Nccl().failures[rank] = {exchanges, error};
}

}  // namespace lrmoe::fake_cuda

using namespace lrmoe::fake_cuda;  // NOLINT: what follows are NCCL's own functions

ncclResult_t ncclGetVersion(int* version) {
  const Lock lock(Mutex());
  if (const int error = Injected("ncclGetVersion"); error != 0) return static_cast<ncclResult_t>(error);
  *version = Nccl().version;
  return ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  const Lock lock(Mutex());
  if (const int error = Injected("ncclGetUniqueId"); error != 0) return static_cast<ncclResult_t>(error);
  *id = {};
  std::snprintf(id->internal, sizeof(id->internal), "fake world %d", ++Nccl().last_id);
  Nccl().worlds[id->internal] = std::make_shared<World>();
  return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t error) {
  switch (error) {
    case ncclSuccess:
      return "no error";
    case ncclInvalidUsage:
      return "invalid usage";
    case ncclInvalidArgument:
      return "invalid argument";
    case ncclRemoteError:
      return "remote process exited or there was a network error";
    case ncclSystemError:
      return "unhandled system error";
    default:
      return "error of this fake";
  }
}
const char* ncclGetLastError(ncclComm_t) {
  return "last error of the fake";
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
  const Lock lock(Mutex());
  if (const int error = Injected("ncclCommInitRankConfig"); error != 0)
    return static_cast<ncclResult_t>(error);
  if (config == nullptr || config->blocking != 0) Misuse("a communicator that blocks; not in this fake");
  const auto world = Nccl().worlds.find(id.internal);
  if (world == Nccl().worlds.end()) Misuse("a communicator by an id that ncclGetUniqueId did not give");
  if (rank < 0 || rank >= size || (world->second->size != 0 && world->second->size != size) ||
      world->second->ranks.contains(rank))
    return ncclInvalidArgument;
  auto made = std::make_shared<ncclComm>();
  made->world = world->second;
  made->rank = rank;
  made->device = CurrentDevice();
  made->polls = std::max(1, Nccl().polls);
  if (const auto failure = Nccl().failures.find(rank); failure != Nccl().failures.end()) {
    made->fails_after = failure->second.exchanges;
    made->fails_with = failure->second.error;
  }
  world->second->size = size;
  for (const auto& [_, other] : world->second->ranks)
    if (other->device == made->device) {  // "duplicate GPU", found when they connect
      Fail(*made, ncclInvalidUsage);
      Fail(*other, ncclInvalidUsage);
    }
  world->second->ranks[rank] = made;
  *comm = made.get();
  Nccl().comms[*comm] = made;
  ++Its().communicators;
  return ncclInProgress;
}

// Where a communicator that does not block gets on: each question is a step.
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  const Lock lock(Mutex());
  ncclComm& asked = Known(comm, __func__);
  if (asked.error == ncclSuccess && Complete(*asked.world)) {
    if (asked.polls > 0) --asked.polls;
    if (asked.polls == 0 && asked.next != nullptr) Launch(asked);
  }
  *error = asked.error != ncclSuccess ? asked.error : asked.polls > 0 ? ncclInProgress : ncclSuccess;
  return ncclSuccess;
}

// Ends what is under way, whose data are then anybody's guess, and the communicator.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
  const Lock lock(Mutex());
  ncclComm& ended = Known(comm, __func__);
  ended.aborted = true;
  ended.next = nullptr;
  ended.launched.clear();
  ended.world.reset();
  Nccl().comms.erase(comm);
  --Its().communicators;
  return ncclSuccess;
}

ncclResult_t ncclGroupStart() {
  ++group.depth;
  return ncclSuccess;
}
ncclResult_t ncclSend(const void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  const Lock lock(Mutex());
  if (const int error = Injected(__func__); error != 0) return static_cast<ncclResult_t>(error);
  if (type != ncclUint8) Misuse("other types than bytes; not in this fake");
  auto* const from = const_cast<std::byte*>(static_cast<const std::byte*>(data));
  return Tell(comm, stream, {.send = true, .peer = peer, .data = from, .bytes = static_cast<int64_t>(count)},
              __func__);
}
ncclResult_t ncclRecv(void* data, size_t count, ncclDataType_t type, int peer, ncclComm_t comm,
                      cudaStream_t stream) {
  const Lock lock(Mutex());
  if (const int error = Injected(__func__); error != 0) return static_cast<ncclResult_t>(error);
  if (type != ncclUint8) Misuse("other types than bytes; not in this fake");
  auto* const to = static_cast<std::byte*>(data);
  return Tell(comm, stream, {.send = false, .peer = peer, .data = to, .bytes = static_cast<int64_t>(count)},
              __func__);
}
// Nothing is on a stream yet: the communicator launches when it is asked next.
ncclResult_t ncclGroupEnd() {
  const Lock lock(Mutex());
  if (group.depth == 0) Misuse("ncclGroupEnd without a start");
  if (--group.depth > 0) return ncclSuccess;
  const auto told = std::exchange(group.told, {});
  if (const int error = Injected(__func__); error != 0) return static_cast<ncclResult_t>(error);
  for (const auto& [comm, exchange] : told) {
    comm->next = std::make_shared<Exchange>(exchange);
    comm->polls = Nccl().polls;
  }
  return told.empty() ? ncclSuccess : ncclInProgress;
}
