// The worker protocol (proto/lrmoe/v1/worker.proto): what a training process asks of its local worker.
// gRPC threads validate requests and queue them; the engine thread executes them one after another and
// replies. A bad request of an open session to a collective operation still takes part in it
// (Engine::Refuse), so that every rank gets the error instead of waiting for this one.
#pragma once

#include <grpcpp/support/server_callback.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan.h"
#include "lrmoe/v1/worker.grpc.pb.h"
#include "worker/rpc/engine_port.h"
#include "worker/rpc/engine_thread.h"
#include "worker/rpc/session.h"

namespace lrmoe::worker {

struct ServiceOptions {
  int32_t rank = 0;
  int32_t world_size = 1;
  ArenaLimits arena_limits;
  // Allocations of the client on the device: each holds the addresses of a whole one, and PyTorch's allocator
  // has tens to hundreds.
  size_t max_imports = 1024;
  // For the client's event to fire on the device, once a call that waits for it has begun.
  std::chrono::milliseconds event_timeout{60000};
  std::string version;
  EngineFactory create_engine;
  // The first framework's model is known and all ranks agree on it. On the engine thread.
  std::function<void(const ModelSpec&)> on_model;
  // A session is over, whatever ended it; calls of its client that were queued are done. On the engine
  // thread.
  std::function<void(const std::string& client)> on_closed;
  // An engine error ended the epoch (DeadlineExceeded or Unavailable). Once, on the engine thread.
  std::function<void(const absl::Status&)> on_dead;
};

class WorkerService final : public v1::Worker::CallbackService {
 public:
  explicit WorkerService(ServiceOptions options);
  // Shut the server down first.
  ~WorkerService() override;

  // Any thread. The epoch is over: open and later calls get Unavailable(reason), the client is told. What the
  // engine runs right now is not interrupted (abort its transport for that). Idempotent: the first reason
  // stays.
  void EndEpoch(const std::string& reason);
  // Orderly end: returns when every rank's worker is here; OK at once when no framework ever attached. A rank
  // that still calls collectives gets an error that names this one. Not from gRPC or engine threads.
  absl::Status Finish();
  // Answers what is queued, then ends the engine thread. The server may still run: later calls get
  // Unavailable.
  void Stop();
  bool attached() const { return sessions_.current() != nullptr; }

  // Called once, on the engine thread or before the call that is answered returns.
  using Reply = std::function<void(const absl::Status&)>;
  // What a lane carries. Any thread; request and response live until `reply` was called.
  void RunForward(const v1::ForwardRequest* request, v1::ForwardResponse* response, Reply reply);
  void RunBackward(const v1::BackwardRequest* request, v1::BackwardResponse* response, Reply reply);
  // Where clients find it; before the service is served.
  void SetLane(const std::string& path) { lane_ = path; }

 private:
  using Context = grpc::CallbackServerContext;
  using Reactor = grpc::ServerUnaryReactor;

  grpc::ServerWriteReactor<v1::SessionEvent>* Attach(Context* context,
                                                     const v1::AttachRequest* request) override;
  Reactor* Detach(Context* context, const v1::DetachRequest* request, v1::DetachResponse* response) override;
  Reactor* CreateArena(Context* context, const v1::CreateArenaRequest* request, v1::Arena* response) override;
  Reactor* ReleaseArena(Context* context, const v1::ReleaseArenaRequest* request,
                        v1::ReleaseArenaResponse* response) override;
  Reactor* ImportDeviceMemory(Context* context, const v1::ImportDeviceMemoryRequest* request,
                              v1::DeviceMemory* response) override;
  Reactor* ReleaseDeviceMemory(Context* context, const v1::ReleaseDeviceMemoryRequest* request,
                               v1::ReleaseDeviceMemoryResponse* response) override;
  Reactor* ShareEvents(Context* context, const v1::ShareEventsRequest* request,
                       v1::ShareEventsResponse* response) override;
  Reactor* LoadExpert(Context* context, const v1::LoadExpertRequest* request,
                      v1::LoadExpertResponse* response) override;
  Reactor* FinishLoad(Context* context, const v1::FinishLoadRequest* request,
                      v1::FinishLoadResponse* response) override;
  Reactor* ExportExpert(Context* context, const v1::ExportExpertRequest* request,
                        v1::ExportExpertResponse* response) override;
  Reactor* Forward(Context* context, const v1::ForwardRequest* request,
                   v1::ForwardResponse* response) override;
  Reactor* Backward(Context* context, const v1::BackwardRequest* request,
                    v1::BackwardResponse* response) override;
  Reactor* Discard(Context* context, const v1::DiscardRequest* request,
                   v1::DiscardResponse* response) override;
  Reactor* OptimizerStep(Context* context, const v1::OptimizerStepRequest* request,
                         v1::OptimizerStepResponse* response) override;
  Reactor* GradientNorm(Context* context, const v1::GradientNormRequest* request,
                        v1::GradientNormResponse* response) override;
  Reactor* ZeroGradients(Context* context, const v1::ZeroGradientsRequest* request,
                         v1::ZeroGradientsResponse* response) override;
  Reactor* SaveCheckpoint(Context* context, const v1::SaveCheckpointRequest* request,
                          v1::SaveCheckpointResponse* response) override;
  Reactor* LoadCheckpoint(Context* context, const v1::LoadCheckpointRequest* request,
                          v1::LoadCheckpointResponse* response) override;

  absl::StatusOr<std::shared_ptr<Session>> OpenSession(const v1::AttachRequest& request, uint64_t id,
                                                       std::shared_ptr<AttachStream> stream);
  // On the engine thread: creates the engine for the first model, refuses another one later.
  absl::Status EnsureEngine(EngineSlot& slot, const ModelSpec& model);
  void CloseSession(uint64_t id, const absl::Status& status);

  // The open session `id`, or why there is none.
  absl::StatusOr<std::shared_ptr<Session>> FindSession(uint64_t id);
  // Both validate on this thread (`check(session)` returns StatusOr<Call>), queue `run(engine, call)` and
  // reply with the status it returns. A bad request to a collective takes part in it by refusing it; to a
  // local operation of this rank it just gets its error.
  struct Wanted {  // which operation of which session, as the client named it
    uint64_t session = 0;
    engine::Operation operation{};
    Invocation named;
  };
  template <typename Check, typename Run>
  void Collective(Reply reply, const Wanted& wanted, const Check& check, Run run);
  template <typename Check, typename Run>
  Reactor* Collective(Context* context, uint64_t session, engine::Operation operation,
                      const Invocation& named, const Check& check, Run run);
  template <typename Check, typename Run>
  Reactor* Local(Context* context, uint64_t session, const Check& check, Run run);
  void PostReply(Reply reply, std::function<absl::Status(EnginePort&)> run);
  // Queues `run(session's shares, engine slot)` and replies with the status it returns.
  template <typename Run>
  Reactor* OnDevice(Context* context, uint64_t session, Run run);
  // On the engine thread: the plan's figures are shown again with the backward pass.
  void RememberPlan(const ExecutionPlan& plan, bool needs_backward, v1::InvocationSummary* summary);

  const ServiceOptions options_;
  std::string lane_;
  SessionTable sessions_;
  std::mutex mutex_;
  std::string ended_;  // guarded by mutex_; why the epoch is over, empty while it is not
  // Of the forwards that may get a backward: as many as the engine has open contexts. Engine thread only.
  std::map<Invocation, v1::InvocationSummary> planned_;
  EngineThread engine_thread_;  // last: its jobs use the rest
};

}  // namespace lrmoe::worker
