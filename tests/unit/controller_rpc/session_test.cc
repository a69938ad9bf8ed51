// Worker streams against a controller in this process.
#include <unistd.h>

#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "grpcpp/create_channel.h"
#include "grpcpp/generic/generic_stub.h"
#include "proto/convert.h"
#include "tests/unit/controller_rpc/fixture.h"

namespace lrmoe::test {
namespace {

using Catch::Matchers::Contains;

SourceCounts CountsOf(int64_t step, int32_t layer, int64_t base) {
  SourceCounts counts{{step, layer, 0}, {}};
  for (int64_t expert = 0; expert < 8; ++expert) counts.counts.push_back(base + expert);
  return counts;
}

TEST_CASE("every rank gets the same plan of the counts it sent") {
  InProcessController controller;
  auto streams = JoinAll(controller.listener->address(), 3);
  for (int64_t step = 0; step < 20; ++step) {
    for (int32_t layer = 0; layer < 4; ++layer) {
      for (int32_t rank = 0; rank < 3; ++rank) streams[rank]->Send(CountsOf(step, layer, 10 * rank + step));
      const ExecutionPlan first = streams[0]->Expect<ExecutionPlan>();
      CHECK(first.plan.invocation == Invocation{step, layer, 0});
      CHECK(first.plan.plan_us > 0);
      for (int32_t rank = 1; rank < 3; ++rank) CHECK(streams[rank]->Expect<ExecutionPlan>() == first);
      std::vector<int64_t> sent(8, 0);
      for (const InstancePlan& instance : first.plan.instances)
        sent[instance.expert_idx] += instance.forward_rows_by_source[1];
      CHECK(sent == CountsOf(step, layer, 10 + step).counts);
    }
  }
  for (auto& stream : streams) stream->Send(Leaving{});
  for (auto& stream : streams) CHECK(stream->Finish().ok());
}

TEST_CASE("a rank that comes back gets the plan it missed") {
  InProcessController controller;
  auto streams = JoinAll(controller.listener->address(), 2);
  streams[0]->Send(CountsOf(0, 0, 1));
  streams[1]->Send(CountsOf(0, 0, 2));
  const ExecutionPlan plan = streams[0]->Expect<ExecutionPlan>();
  streams[1]->Cancel();
  streams[1] = std::make_unique<WorkerStream>(Connect(controller.listener->address()));
  Hello again = HelloOf(1, 2);
  again.epoch = Epoch{1};
  streams[1]->Send(again);
  CHECK(streams[1]->Expect<Welcome>().epoch == Epoch{1});
  streams[1]->Send(SmallModel());
  streams[1]->Send(CountsOf(0, 0, 2));
  CHECK(streams[1]->Expect<ExecutionPlan>() == plan);
}

TEST_CASE("a lost rank ends the epoch for everybody, by name") {
  ServerOptions options;
  options.core.reconnect_grace_us = 10'000;
  InProcessController controller(options);
  auto streams = JoinAll(controller.listener->address(), 3);
  streams[1]->Cancel();
  for (int32_t rank : {0, 2}) {
    CHECK_THAT(streams[rank]->Expect<Abort>().reason, Contains("rank 1 (node node) was lost"));
    const grpc::Status status = streams[rank]->Finish();
    CHECK(status.error_code() == grpc::StatusCode::ABORTED);
    CHECK_THAT(status.error_message(), Contains("rank 1"));
  }
}

TEST_CASE("an infeasible plan is an error on every rank, and the controller goes on") {
  int calls = 0;
  InProcessController controller({},
                                 [&](const planner::PlanningProblem& problem) -> absl::StatusOr<LayerPlan> {
                                   if (++calls == 1)
                                     return absl::ResourceExhaustedError("rank 0 needs 5 bytes more");
                                   return planner::Plan(problem);
                                 });
  auto streams = JoinAll(controller.listener->address(), 2);
  for (auto& stream : streams) stream->Send(CountsOf(0, 0, 1));
  for (auto& stream : streams) {
    const PlanError error = stream->Expect<PlanError>();
    CHECK(error.status == absl::ResourceExhaustedError("rank 0 needs 5 bytes more"));
    CHECK(error.invocation == Invocation{0, 0, 0});
  }
  for (auto& stream : streams) stream->Send(CountsOf(0, 0, 1));
  for (auto& stream : streams) stream->Expect<ExecutionPlan>();
}

TEST_CASE("stopping tells every worker") {
  InProcessController controller;
  auto streams = JoinAll(controller.listener->address(), 2);
  WorkerStream silent(Connect(controller.listener->address()));
  v1::WorkerMessage wire;
  std::thread stop([&] { controller.listener->Stop("controller stopping (SIGTERM)"); });
  for (auto& stream : streams) {
    CHECK(stream->Expect<Abort>().reason == "controller stopping (SIGTERM)");
    CHECK(stream->Finish().error_code() == grpc::StatusCode::ABORTED);
  }
  stop.join();
}

// What a broken or hostile peer may send. Afterwards the controller serves a job as if nothing had been.
TEST_CASE("garbage ends its own stream, nothing else") {
  InProcessController controller;
  const std::string address = controller.listener->address();
  {
    INFO("no hello first");
    WorkerStream stream(Connect(address));
    stream.Send(Heartbeat{1});
    CHECK(stream.Finish().error_code() == grpc::StatusCode::FAILED_PRECONDITION);
  }
  {
    INFO("a bad hello");
    WorkerStream stream(Connect(address));
    v1::WorkerMessage wire;
    ToWire(HelloOf(0, 2), &wire);
    wire.mutable_hello()->set_rank(5);
    stream.SendWire(wire);
    const grpc::Status status = stream.Finish();
    CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    CHECK(status.error_message() == "hello.rank is 5; allowed: 0..1");
  }
  {
    INFO("an empty message");
    WorkerStream stream(Connect(address));
    stream.SendWire(v1::WorkerMessage());
    CHECK(stream.Finish().error_code() == grpc::StatusCode::INVALID_ARGUMENT);
  }
  {
    INFO("a message beyond the limit");
    WorkerStream stream(Connect(address));
    v1::WorkerMessage wire;
    wire.mutable_leaving()->set_reason(std::string(2 << 20, 'x'));
    stream.SendWire(wire);
    CHECK_FALSE(stream.Finish().ok());
  }
  {
    INFO("bytes that are no protobuf");
    grpc::GenericStub stub(Connect(address));
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(10));
    grpc::CompletionQueue queue;
    auto call = stub.PrepareCall(&context, "/lrmoe.v1.Controller/Session", &queue);
    call->StartCall(reinterpret_cast<void*>(1));
    void* tag = nullptr;
    bool ok = false;
    queue.Next(&tag, &ok);
    const grpc::Slice slice(std::string("\xFF\xFF\xFF\xFFgarbage"));
    call->Write(grpc::ByteBuffer(&slice, 1), reinterpret_cast<void*>(2));
    queue.Next(&tag, &ok);
    grpc::Status status;
    call->Finish(&status, reinterpret_cast<void*>(3));
    queue.Next(&tag, &ok);
    CHECK(status.error_code() == grpc::StatusCode::INVALID_ARGUMENT);
    queue.Shutdown();
    while (queue.Next(&tag, &ok)) {
    }
  }
  auto streams = JoinAll(address, 2);
  for (auto& stream : streams) stream->Send(CountsOf(0, 0, 1));
  for (auto& stream : streams) stream->Expect<ExecutionPlan>();
}

TEST_CASE("a Unix socket serves too, for its owner only, and a second controller cannot have the same port") {
  const std::string path =
      absl::StrCat(std::filesystem::temp_directory_path().string(), "/lrmoe-test-", getpid());
  {
    InProcessController controller({}, planner::Plan, "unix:" + path);
    CHECK(controller.listener->address() == "unix:" + path);
    const auto mode = std::filesystem::status(path).permissions();
    CHECK((mode & (std::filesystem::perms::group_all | std::filesystem::perms::others_all)) ==
          std::filesystem::perms::none);
    auto streams = JoinAll(controller.listener->address(), 1);
    streams[0]->Send(CountsOf(0, 0, 1));
    streams[0]->Expect<ExecutionPlan>();
  }
  CHECK_FALSE(std::filesystem::exists(path));
  InProcessController first;
  Server second({}, planner::Plan);
  const auto refused = rpc::Listener::Start({.address = first.listener->address()}, &second);
  CHECK(refused.status().code() == absl::StatusCode::kUnavailable);
  Server third({}, planner::Plan);
  CHECK(rpc::Listener::Start({.address = "nowhere"}, &third).status().code() ==
        absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace lrmoe::test
