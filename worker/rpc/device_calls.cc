// The worker protocol's calls about the client's device memory; all of them on the engine thread, in the
// order of the calls that use it.
#include <utility>

#include "common/status_macros.h"
#include "worker/rpc/device_memory.h"
#include "worker/rpc/grpc_status.h"
#include "worker/rpc/worker_service.h"

namespace lrmoe::worker {

template <typename Run>
grpc::ServerUnaryReactor* WorkerService::OnDevice(Context* context, uint64_t session, Run run) {
  Reactor* reactor = context->DefaultReactor();
  auto found = FindSession(session);
  const absl::Status posted =
      !found.ok() ? found.status()
                  : engine_thread_.Post(
                        {.run = [session = *std::move(found), run = std::move(run)](
                                    EngineSlot& slot) { return run(session->device, slot); },
                         .done = [reactor](const absl::Status& status) { reactor->Finish(ToGrpc(status)); }});
  if (!posted.ok()) reactor->Finish(ToGrpc(posted));
  return reactor;
}

grpc::ServerUnaryReactor* WorkerService::ImportDeviceMemory(Context* context,
                                                            const v1::ImportDeviceMemoryRequest* request,
                                                            v1::DeviceMemory* response) {
  return OnDevice(context, request->session(), [request, response](DeviceShares& shares, EngineSlot& slot) {
    kernels::Interprocess* const device = slot.engine->interprocess();
    LRMOE_RETURN_IF_ERROR(CheckSameDevice(device, request->device_uuid()));
    LRMOE_ASSIGN_OR_RETURN(const uint64_t id,
                           shares.Import(*device, slot.openings, request->handle(), request->bytes()));
    response->set_device_memory(id);
    return absl::OkStatus();
  });
}

grpc::ServerUnaryReactor* WorkerService::ReleaseDeviceMemory(Context* context,
                                                             const v1::ReleaseDeviceMemoryRequest* request,
                                                             v1::ReleaseDeviceMemoryResponse*) {
  return OnDevice(context, request->session(), [request](DeviceShares& shares, EngineSlot&) {
    return shares.Release(request->device_memory());  // closed before the answer
  });
}

grpc::ServerUnaryReactor* WorkerService::ShareEvents(Context* context, const v1::ShareEventsRequest* request,
                                                     v1::ShareEventsResponse* response) {
  return OnDevice(context, request->session(), [request, response](DeviceShares& shares, EngineSlot& slot) {
    kernels::Interprocess* const device = slot.engine->interprocess();
    LRMOE_RETURN_IF_ERROR(CheckSameDevice(device, request->device_uuid()));
    LRMOE_ASSIGN_OR_RETURN(std::string handle, shares.ShareEvents(*device, slot.openings, request->handle()));
    response->set_handle(std::move(handle));
    return absl::OkStatus();
  });
}

}  // namespace lrmoe::worker
