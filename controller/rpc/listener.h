// The gRPC server: both services, health and reflection on one address.
#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "controller/rpc/admin_service.h"
#include "controller/rpc/controller_service.h"
#include "grpcpp/server.h"

namespace lrmoe::rpc {

struct ListenerOptions {
  std::string address =
      "127.0.0.1:7070";  // host:port (port 0: any free one), [v6]:port, or unix:path (mode 0600)
  int32_t max_message_bytes = 1 << 20;  // largest a worker or lrmoectl may send; 4 KiB..64 MiB
};
absl::Status Validate(const ListenerOptions& options);

class Listener {
 public:
  // Listens. `server` has been given nothing yet and outlives the listener; this starts it. Unavailable when
  // the address cannot be had, InvalidArgument when it is none.
  static absl::StatusOr<std::unique_ptr<Listener>> Start(const ListenerOptions& options, Server* server);
  ~Listener();  // stops

  const std::string& address() const { return address_; }  // with the port that was chosen

  // Tells every worker that the epoch is over and why, then ends every call; takes up to a second.
  void Stop(const std::string& reason);

 private:
  explicit Listener(Server* server) : server_(server), controller_(server), admin_(server) {}

  Server* const server_;
  ControllerService controller_;
  AdminService admin_;
  std::string address_;
  std::unique_ptr<grpc::Server> grpc_;
};

}  // namespace lrmoe::rpc
