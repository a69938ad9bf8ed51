// Forward and Backward for a client that makes them one at a time: a Unix socket of whole messages
// (SOCK_SEQPACKET) beside the gRPC one, which costs a tenth of gRPC's time. A message is a LaneCall, its
// answer a LaneReply with the same number; everything else of the protocol stays with gRPC, sessions
// included.
#pragma once

#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/rpc/worker_service.h"

namespace lrmoe::worker {

class Lane {
 public:
  // Serves `service`, which outlives it, at `path`, replacing what is there. Whoever may write to the socket
  // may connect: set the umask. InvalidArgument for a path over 107 bytes.
  static absl::StatusOr<std::unique_ptr<Lane>> Start(const std::string& path, WorkerService* service);
  // Closes all connections, removes the socket. Answers that come later are dropped.
  ~Lane();

  // A message is some descriptors; a longer one ends its connection, as does anything that is no LaneCall.
  static constexpr size_t kMaxMessageBytes = 64 << 10;
  // One framework at a time, and room for one that is going.
  static constexpr size_t kMaxClients = 4;

 private:
  class Client;

  Lane() = default;
  void Run();
  void Accept();
  // Takes one message. False: the connection is over.
  bool Serve(const std::shared_ptr<Client>& client);

  std::string path_;
  WorkerService* service_ = nullptr;
  int listening_ = -1, stop_ = -1;                // descriptors; readable: ends
  std::vector<char> buffer_;                      // lane thread only
  std::vector<std::shared_ptr<Client>> clients_;  // lane thread only
  std::thread thread_;
};

}  // namespace lrmoe::worker
