// The gRPC server of the worker protocol on its Unix socket, and the lane beside it.
// Who may connect: the socket has mode 0600 and, when the worker makes its directory, that has mode 0700;
// connecting to a Unix socket takes write permission on it, so the kernel admits the worker's own user (and
// root) only.
#pragma once

#include <grpcpp/server.h>

#include <chrono>

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/rpc/lane.h"
#include "worker/rpc/worker_service.h"

namespace lrmoe::worker {

class SocketServer {
 public:
  // Serves `service`, health and reflection at `path`, an absolute path whose directory exists or can be
  // made. InvalidArgument for a path that is no socket address (over 107 bytes); AlreadyExists when somebody
  // serves there now; a dead worker's socket is replaced. Call before threads that create files: it changes
  // the umask for a moment.
  static absl::StatusOr<std::unique_ptr<SocketServer>> Start(const std::string& path, WorkerService* service);
  // Removes the sockets, and the directory if Start made it.
  ~SocketServer();
  // Of the lane that Start opens for a server at `path`; empty when that would be no socket address: then
  // there is none.
  static std::string LanePath(const std::string& path);

  // Health checks answer NOT_SERVING from now on.
  void SetUnhealthy();
  // Refuses new calls, waits for open ones at most `grace`, then cancels them.
  void Shutdown(std::chrono::milliseconds grace);

 private:
  SocketServer() = default;
  std::string path_;
  std::string made_directory_;  // empty when it was there
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Lane> lane_;
};

}  // namespace lrmoe::worker
