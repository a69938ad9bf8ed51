#include "tests/unit/controller_rpc/fixture.h"

#include <stdexcept>
#include <string>

namespace lrmoe::test {

InProcessController::InProcessController(const ServerOptions& options, Server::PlanFunction plan,
                                         const std::string& address)
    : server(options, std::move(plan)) {
  auto started = rpc::Listener::Start({.address = address}, &server);
  if (!started.ok()) throw std::runtime_error(std::string(started.status().message()));
  listener = *std::move(started);
}

std::vector<std::unique_ptr<WorkerStream>> JoinAll(const std::string& address, int32_t world_size,
                                                   const std::string& job) {
  std::vector<std::unique_ptr<WorkerStream>> streams;
  for (int32_t rank = 0; rank < world_size; ++rank) {
    streams.push_back(std::make_unique<WorkerStream>(Connect(address)));
    streams.back()->Send(HelloOf(rank, world_size, job));
  }
  for (auto& stream : streams) {
    stream->Expect<Welcome>();
    stream->Send(SmallModel());
  }
  return streams;
}

}  // namespace lrmoe::test
