// The session service: one reactor per worker stream. It validates what comes and posts it; what the loop
// sends goes out in order through a bounded queue. The streams carry bytes, so that a message for many ranks
// is serialised once.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <vector>

#include "controller/server.h"
#include "lrmoe/v1/controller.grpc.pb.h"

namespace lrmoe::rpc {

class SessionReactor;

class ControllerService final : public v1::Controller::WithRawCallbackMethod_Session<v1::Controller::Service>,
                                public SessionSink {
 public:
  // `server` outlives the service and every stream.
  explicit ControllerService(Server* server) : server_(server) {}

  grpc::ServerBidiReactor<grpc::ByteBuffer, grpc::ByteBuffer>* Session(
      grpc::CallbackServerContext* context) override;

  // SessionSink; the loop thread.
  void Send(const std::vector<core::SessionId>& sessions,
            const std::shared_ptr<const ControllerMessage>& message) override;
  void Close(core::SessionId session, const absl::Status& status) override;
  void Taken(core::SessionId session) override;

 private:
  friend class SessionReactor;
  std::shared_ptr<SessionReactor> Find(core::SessionId session);
  void Forget(core::SessionId session);

  Server* const server_;
  std::mutex mutex_;  // never held while a reactor's is taken
  std::map<core::SessionId, std::shared_ptr<SessionReactor>> reactors_;
};

}  // namespace lrmoe::rpc
