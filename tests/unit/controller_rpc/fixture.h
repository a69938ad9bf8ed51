// A controller in this process, listening on a loopback port.
#pragma once

#include <memory>
#include <vector>

#include "controller/planner/planner.h"
#include "controller/rpc/listener.h"
#include "controller/server.h"
#include "tests/unit/controller_rpc/worker_stream.h"

namespace lrmoe::test {

struct InProcessController {
  explicit InProcessController(const ServerOptions& options = {}, Server::PlanFunction plan = planner::Plan,
                               const std::string& address = "127.0.0.1:0");
  ~InProcessController() { listener->Stop("test over"); }

  Server server;
  std::unique_ptr<rpc::Listener> listener;
};

// Says hello on `world_size` streams and reads their Welcomes; sends the model on each.
std::vector<std::unique_ptr<WorkerStream>> JoinAll(const std::string& address, int32_t world_size,
                                                   const std::string& job = "job");

}  // namespace lrmoe::test
