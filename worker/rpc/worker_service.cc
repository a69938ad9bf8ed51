// Sessions, arenas and the end of the epoch; the operations of the engine are in worker_calls.cc.
#include "worker/rpc/worker_service.h"

#include <sys/random.h>

#include <future>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "proto/convert.h"
#include "worker/rpc/grpc_status.h"

namespace lrmoe::worker {
namespace {

constexpr size_t kMaxClientName = 256;

uint64_t RandomId() {
  uint64_t id = 0;
  while (id == 0) LRMOE_CHECK_EQ(getrandom(&id, sizeof(id), 0), static_cast<ssize_t>(sizeof(id)));
  return id;
}

bool EpochIsDead(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status);
}

absl::Status Different(const ModelSpec& attached, const ModelSpec& asked) {
  const auto text = [](const ModelSpec& model) {
    const LayerShape& shape = model.shape;
    return absl::StrCat("layers ", model.num_layers, ", experts ", shape.num_experts, ", top_k ", shape.top_k,
                        ", hidden_size ", shape.hidden_size, ", intermediate_size ", shape.intermediate_size,
                        shape.gated ? ", gated " : ", plain ", Name(shape.activation), ", ",
                        Name(shape.dtype));
  };
  return absl::FailedPreconditionError(absl::StrCat("model: this worker holds (", text(attached),
                                                    "), the client asks for (", text(asked), ")"));
}

}  // namespace

WorkerService::WorkerService(ServiceOptions options)
    : options_(std::move(options)), engine_thread_([this](const absl::Status& status) {
        EndEpoch(std::string(status.message()));
        options_.on_dead(status);
      }) {}

WorkerService::~WorkerService() {
  Stop();
}

void WorkerService::Stop() {
  engine_thread_.Stop();
}

grpc::ServerWriteReactor<v1::SessionEvent>* WorkerService::Attach(Context*,
                                                                  const v1::AttachRequest* request) {
  const uint64_t id = RandomId();
  const auto stream =
      AttachStream::Create([this, id] { CloseSession(id, absl::CancelledError("the client is gone")); });
  const auto opened = OpenSession(*request, id, stream);
  if (!opened.ok()) {
    stream->Close(opened.status());
    return stream.get();
  }
  const std::shared_ptr<Session>& session = *opened;
  auto attached = std::make_shared<v1::Attached>();
  const absl::Status posted =
      engine_thread_.Post({.run =
                               [this, session, attached](EngineSlot& slot) {
                                 LRMOE_RETURN_IF_ERROR(EnsureEngine(slot, session->model));
                                 const std::vector<int32_t>& owned = slot.engine->owned();
                                 attached->mutable_owned_experts()->Assign(owned.begin(), owned.end());
                                 if (const auto* device = slot.engine->interprocess())
                                   attached->set_device_uuid(device->uuid());
                                 return absl::OkStatus();
                               },
                           .done =
                               [this, session, attached](const absl::Status& status) {
                                 if (!status.ok()) return CloseSession(session->id, status);
                                 attached->set_session(session->id);
                                 attached->set_rank(options_.rank);
                                 attached->set_world_size(options_.world_size);
                                 attached->set_version(options_.version);
                                 attached->set_lane(lane_);
                                 session->stream->Accept(*attached);
                               }});
  if (!posted.ok()) CloseSession(session->id, posted);
  return stream.get();
}

absl::StatusOr<std::shared_ptr<Session>> WorkerService::OpenSession(const v1::AttachRequest& request,
                                                                    uint64_t id,
                                                                    std::shared_ptr<AttachStream> stream) {
  if (request.protocol_version() != kProtocolVersion) {
    return absl::FailedPreconditionError(absl::StrCat("protocol_version: ", request.protocol_version(),
                                                      ", this worker speaks ", kProtocolVersion));
  }
  if (request.client().size() > kMaxClientName) {
    return absl::InvalidArgumentError(
        absl::StrCat("client: ", request.client().size(), " bytes, allowed are ", kMaxClientName));
  }
  LRMOE_ASSIGN_OR_RETURN(const ModelSpec model, FromWire(request.model()));
  if (request.expected_world_size() != 0 && request.expected_world_size() != options_.world_size) {
    return absl::FailedPreconditionError(absl::StrCat("expected_world_size: ", request.expected_world_size(),
                                                      ", this worker is one of ", options_.world_size));
  }
  auto session =
      std::make_shared<Session>(id, request.client(), model, options_.arena_limits, options_.max_imports);
  session->stream = std::move(stream);
  std::lock_guard lock(mutex_);
  if (!ended_.empty()) return absl::UnavailableError(ended_);
  LRMOE_RETURN_IF_ERROR(sessions_.Open(session));
  return session;
}

absl::Status WorkerService::EnsureEngine(EngineSlot& slot, const ModelSpec& model) {
  if (slot.engine) return slot.model == model ? absl::OkStatus() : Different(slot.model, model);
  LRMOE_ASSIGN_OR_RETURN(slot.engine, options_.create_engine(model));
  slot.model = model;
  options_.on_model(model);
  return absl::OkStatus();
}

void WorkerService::CloseSession(uint64_t id, const absl::Status& status) {
  const std::shared_ptr<Session> session = sessions_.Close(id);
  if (!session) return;
  session->stream->Close(status);
  session->arenas.Clear();
  session->device.Clear();  // closed by the engine thread behind the job below, or the next one
  // Contexts it left open stay until a later step of their layer or a checkpoint frees them, on all ranks
  // alike: only a collective operation may change what the ranks hold in common. Not queued when the worker
  // ends or its queue is full; the figures then go with the next forwards.
  (void)engine_thread_.Post({.run = [](EngineSlot&) { return absl::OkStatus(); },
                             .done =
                                 [this, session](const absl::Status&) {
                                   planned_.clear();
                                   options_.on_closed(session->client);
                                 }});
}

absl::StatusOr<std::shared_ptr<Session>> WorkerService::FindSession(uint64_t id) {
  {
    std::lock_guard lock(mutex_);
    if (!ended_.empty()) return absl::UnavailableError(ended_);
  }
  return sessions_.Find(id);
}

void WorkerService::EndEpoch(const std::string& reason) {
  std::string first;
  {
    std::lock_guard lock(mutex_);
    if (ended_.empty()) ended_ = reason.empty() ? "the epoch is over" : reason;
    first = ended_;
  }
  engine_thread_.EndEpoch(first);
  if (const auto session = sessions_.current()) session->stream->CloseWithEnded(first);
}

absl::Status WorkerService::Finish() {
  std::promise<absl::Status> finished;
  // Every disagreement answers a call of another rank's framework with an error that names this rank; after
  // that this rank offers to finish again. The limit only stops an engine that fails for a reason of its own.
  constexpr int kMaxOffers = 10000;
  absl::Status posted =
      engine_thread_.Post({.run =
                               [](EngineSlot& slot) {
                                 absl::Status status;
                                 for (int i = 0; slot.engine && i < kMaxOffers; ++i) {
                                   status = slot.engine->Finish();
                                   if (status.ok() || EpochIsDead(status)) break;
                                 }
                                 return status;
                               },
                           .done = [&finished](const absl::Status& status) { finished.set_value(status); }});
  if (!posted.ok()) return posted;
  // Ends with the epoch at the latest: every engine call has a deadline, and EndEpoch answers what is queued.
  return finished.get_future().get();
}

grpc::ServerUnaryReactor* WorkerService::Detach(Context* context, const v1::DetachRequest* request,
                                                v1::DetachResponse*) {
  Reactor* reactor = context->DefaultReactor();
  const auto session = sessions_.Find(request->session());
  if (session.ok()) CloseSession(request->session(), absl::OkStatus());
  reactor->Finish(ToGrpc(session.status()));
  return reactor;
}

grpc::ServerUnaryReactor* WorkerService::CreateArena(Context* context, const v1::CreateArenaRequest* request,
                                                     v1::Arena* response) {
  Reactor* reactor = context->DefaultReactor();
  absl::Status status;
  if (const auto session = FindSession(request->session()); !session.ok()) {
    status = session.status();
  } else if (const auto arena = (*session)->arenas.Create(request->bytes()); !arena.ok()) {
    status = arena.status();
  } else {
    response->set_arena((*arena)->id());
    response->set_path((*arena)->path());
    response->set_bytes(static_cast<int64_t>((*arena)->memory().size()));
  }
  reactor->Finish(ToGrpc(status));
  return reactor;
}

grpc::ServerUnaryReactor* WorkerService::ReleaseArena(Context* context,
                                                      const v1::ReleaseArenaRequest* request,
                                                      v1::ReleaseArenaResponse*) {
  Reactor* reactor = context->DefaultReactor();
  const auto session = FindSession(request->session());
  reactor->Finish(ToGrpc(session.ok() ? (*session)->arenas.Release(request->arena()) : session.status()));
  return reactor;
}

}  // namespace lrmoe::worker
