// What lrmoectl asks, against a controller in this process with a running job.
#include <catch2/catch.hpp>
#include <chrono>
#include <string>
#include <thread>

#include "lrmoe/v1/admin.grpc.pb.h"
#include "proto/convert.h"
#include "tests/unit/controller_rpc/fixture.h"

namespace lrmoe::test {
namespace {

using Catch::Matchers::Contains;

// A call with a deadline; CHECKs that it succeeds.
template <typename Request, typename Response>
Response Call(v1::Admin::Stub& admin,
              grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&, Response*),
              const Request& request = {}) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  Response response;
  const grpc::Status status = (admin.*method)(&context, request, &response);
  CHECK(status.error_message() == "");
  return response;
}

template <typename Request, typename Response>
grpc::Status CallFails(v1::Admin::Stub& admin,
                       grpc::Status (v1::Admin::Stub::*method)(grpc::ClientContext*, const Request&,
                                                               Response*),
                       const Request& request) {
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(20));
  Response response;
  return (admin.*method)(&context, request, &response);
}

void RunInvocation(std::vector<std::unique_ptr<WorkerStream>>& streams, int64_t step, int32_t layer) {
  for (auto& stream : streams) stream->Send(SourceCounts{{step, layer, 0}, {1, 2, 3, 4, 5, 6, 7, 8}});
  for (auto& stream : streams) stream->Expect<ExecutionPlan>();
}

TEST_CASE("status, workers and layers describe the job") {
  InProcessController controller;
  const auto channel = Connect(controller.listener->address());
  const auto admin = v1::Admin::NewStub(channel);
  CHECK(Call(*admin, &v1::Admin::Stub::GetStatus).epoch_state() == "waiting");
  auto streams = JoinAll(controller.listener->address(), 2);
  for (int64_t step = 0; step < 3; ++step)
    for (int32_t layer = 0; layer < 2; ++layer) RunInvocation(streams, step, layer);
  InvocationReport report;
  report.invocation = {2, 1, 0};
  report.peak_bytes = 12345;
  streams[1]->Send(report);
  RunInvocation(streams, 3, 0);  // the report has been taken when its plan is here

  const v1::ControllerStatus status = Call(*admin, &v1::Admin::Stub::GetStatus);
  CHECK(status.epoch() == 1);
  CHECK(status.epoch_state() == "running");
  CHECK(status.ranks_connected() == 2);
  CHECK(status.current_step() == 3);
  CHECK(status.plans_made() == 7);
  CHECK(status.model().num_experts() == 8);
  CHECK(status.plan_us_p50() > 0);
  CHECK(status.missing_ranks().empty());

  const v1::ListWorkersResponse workers = Call(*admin, &v1::Admin::Stub::ListWorkers);
  REQUIRE(workers.workers_size() == 2);
  CHECK(workers.workers(1).rank() == 1);
  CHECK(workers.workers(1).state() == "connected");
  CHECK(workers.workers(1).peak_bytes() == 12345);

  const v1::ListLayersResponse layers = Call(*admin, &v1::Admin::Stub::ListLayers);
  REQUIRE(layers.layers_size() == 2);
  CHECK(layers.layers(0).last_step() == 3);
  CHECK(layers.layers(1).last_step() == 2);
  CHECK(layers.layers(0).routed_rows() == 72);
}

TEST_CASE("plans are listed in pages and shown whole, with reports") {
  InProcessController controller;
  const auto admin = v1::Admin::NewStub(Connect(controller.listener->address()));
  auto streams = JoinAll(controller.listener->address(), 2);
  for (int64_t step = 0; step < 5; ++step) RunInvocation(streams, step, 1);
  for (int32_t rank = 0; rank < 2; ++rank) {
    InvocationReport report;
    report.invocation = {4, 1, 0};
    report.routed_rows = 36;
    streams[rank]->Send(report);
  }
  RunInvocation(streams, 5, 0);

  v1::ListPlansRequest request;
  request.set_page_size(2);
  request.set_has_layer(true);
  request.set_layer(1);
  std::vector<int64_t> steps;
  do {
    const v1::ListPlansResponse page = Call(*admin, &v1::Admin::Stub::ListPlans, request);
    for (const v1::PlanRecord& plan : page.plans()) {
      steps.push_back(plan.plan().invocation().step());
      CHECK(plan.plan().instances().empty());
    }
    request.set_page_token(page.next_page_token());
  } while (!request.page_token().empty());
  CHECK(steps == std::vector<int64_t>{4, 3, 2, 1, 0});

  v1::GetPlanRequest get;
  get.mutable_invocation()->set_step(4);
  get.mutable_invocation()->set_layer(1);
  const v1::PlanRecord record = Call(*admin, &v1::Admin::Stub::GetPlan, get);
  CHECK(FromWire(record.plan()).ok());
  CHECK(record.reports_size() == 2);
  CHECK(record.planned_at_ms() > 0);
  get.set_latest(true);
  get.mutable_invocation()->set_layer(0);
  CHECK(Call(*admin, &v1::Admin::Stub::GetPlan, get).plan().invocation().step() == 5);

  get.mutable_invocation()->set_layer(3);
  CHECK(CallFails(*admin, &v1::Admin::Stub::GetPlan, get).error_code() == grpc::StatusCode::NOT_FOUND);
  request.set_page_size(1001);
  CHECK(CallFails(*admin, &v1::Admin::Stub::ListPlans, request).error_message() ==
        "page_size is 1001; allowed: 0..1000");
  request.set_page_size(1);
  request.set_page_token("yesterday");
  CHECK(CallFails(*admin, &v1::Admin::Stub::ListPlans, request).error_code() ==
        grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_CASE("a policy change is announced to every worker and holds from the step it names") {
  InProcessController controller;
  const auto admin = v1::Admin::NewStub(Connect(controller.listener->address()));
  auto streams = JoinAll(controller.listener->address(), 2);
  RunInvocation(streams, 0, 0);
  v1::SetPolicyRequest set;
  v1::PolicySettings::Field* field = set.mutable_policy()->add_fields();
  field->set_name("rates");
  field->set_value("0.5");
  const v1::SetPolicyResponse response = Call(*admin, &v1::Admin::Stub::SetPolicy, set);
  CHECK(response.from_step() == 1);
  for (auto& stream : streams) CHECK(stream->Expect<PolicyChange>().policy.rates == std::vector<double>{0.5});
  for (auto& stream : streams) stream->Send(SourceCounts{{1, 0, 0}, {1, 2, 3, 4, 5, 6, 7, 8}});
  for (auto& stream : streams) CHECK(stream->Expect<ExecutionPlan>().plan.retention_rate == 0.5);
  CHECK(FromWire(Call(*admin, &v1::Admin::Stub::GetPolicy))->rates == std::vector<double>{0.5});

  field->set_value("nothing");
  CHECK_THAT(CallFails(*admin, &v1::Admin::Stub::SetPolicy, set).error_message(),
             Contains("rates is \"nothing\""));
  set.mutable_policy()->clear_fields();
  CHECK(CallFails(*admin, &v1::Admin::Stub::SetPolicy, set).error_code() ==
        grpc::StatusCode::INVALID_ARGUMENT);
}

TEST_CASE("what-ifs plan recorded counts anew and change nothing") {
  InProcessController controller;
  const auto admin = v1::Admin::NewStub(Connect(controller.listener->address()));
  auto streams = JoinAll(controller.listener->address(), 2);
  for (int64_t step = 0; step < 3; ++step) RunInvocation(streams, step, 0);
  v1::SimulatePlanRequest request;
  request.mutable_recorded()->mutable_invocation()->set_step(1);
  v1::SimulatePlanResponse same = Call(*admin, &v1::Admin::Stub::SimulatePlan, request);
  CHECK(same.recorded().plan().invocation().step() == 1);
  same.mutable_simulated()->set_plan_us(same.recorded().plan().plan_us());
  CHECK(same.simulated().SerializeAsString() == same.recorded().plan().SerializeAsString());

  request.set_planner("fixed");
  request.set_ranks(4);
  v1::PolicySettings::Field* field = request.mutable_policy()->add_fields();
  field->set_name("rates");
  field->set_value("0.5");
  const auto other = SimulatedFromWire(Call(*admin, &v1::Admin::Stub::SimulatePlan, request).simulated());
  REQUIRE(other.ok());
  CHECK(other->policy == "fixed");
  CHECK(other->retention_rate == 0.5);
  CHECK(other->ranks.size() == 4);
  int64_t rows = 0;
  for (const RankPlan& rank : other->ranks) rows += rank.forward_rows;
  CHECK(rows == 72);
  // Every policy of the simulator can be asked, the next plan is made by the one in force.
  field->set_value("1");
  request.set_planner("ideal");
  CHECK(Call(*admin, &v1::Admin::Stub::SimulatePlan, request).simulated().policy() == "ideal");
  RunInvocation(streams, 3, 0);
  v1::GetPlanRequest latest;
  latest.set_latest(true);
  CHECK(Call(*admin, &v1::Admin::Stub::GetPlan, latest).plan().policy() == "lrmoe");
  CHECK(Call(*admin, &v1::Admin::Stub::GetStatus).plans_made() == 4);
}

TEST_CASE("what-ifs refuse what cannot be planned") {
  InProcessController controller;
  const auto admin = v1::Admin::NewStub(Connect(controller.listener->address()));
  auto streams = JoinAll(controller.listener->address(), 2);
  v1::SimulatePlanRequest request;
  CHECK(CallFails(*admin, &v1::Admin::Stub::SimulatePlan, request).error_code() ==
        grpc::StatusCode::NOT_FOUND);
  RunInvocation(streams, 0, 0);
  const auto error = [&] {
    return CallFails(*admin, &v1::Admin::Stub::SimulatePlan, request).error_message();
  };
  request.set_ranks(1025);
  CHECK(error() == "ranks is 1025; allowed: 0..1024");
  request.set_ranks(0);
  request.set_planner("magic");
  CHECK_THAT(error(), Contains("planner is \"magic\"; allowed: lrmoe, "));
  request.set_planner("lrmoe");
  request.set_has_memory_budget_bytes(true);
  request.set_memory_budget_bytes(1);
  CHECK_THAT(error(), Contains("no candidate retention rate fits"));
  request.set_memory_budget_bytes(-1);
  CHECK_THAT(error(), Contains("memory_budget_bytes is -1"));
  request.set_has_memory_budget_bytes(false);
  v1::PolicySettings::Field* field = request.mutable_policy()->add_fields();
  field->set_name("planner");
  field->set_value("fixed");
  CHECK_THAT(error(), Contains("policy names \"planner\""));
}

TEST_CASE("draining asks every worker to leave") {
  InProcessController controller;
  const auto admin = v1::Admin::NewStub(Connect(controller.listener->address()));
  auto streams = JoinAll(controller.listener->address(), 2);
  v1::DrainRequest request;
  request.set_reason("maintenance");
  CHECK(Call(*admin, &v1::Admin::Stub::Drain, request).ranks() == 2);
  for (auto& stream : streams) CHECK(stream->Expect<Drain>().reason == "maintenance");
  request.set_reason(std::string(1025, 'x'));
  CHECK_THAT(CallFails(*admin, &v1::Admin::Stub::Drain, request).error_message(), Contains("reason"));
}

TEST_CASE("watchers see every plan of their layer; too many are refused") {
  ServerOptions options;
  options.max_watchers = 1;
  InProcessController controller(options);
  const auto admin = v1::Admin::NewStub(Connect(controller.listener->address()));
  auto streams = JoinAll(controller.listener->address(), 1);
  v1::WatchPlansRequest request;
  request.set_has_layer(true);
  request.set_layer(1);
  grpc::ClientContext context, second;
  const auto watch = admin->WatchPlans(&context, request);
  watch->WaitForInitialMetadata();
  for (int64_t step = 0; step < 3; ++step)
    for (int32_t layer = 0; layer < 2; ++layer) RunInvocation(streams, step, layer);
  v1::PlanRecord record;
  for (int64_t step = 0; step < 3; ++step) {
    REQUIRE(watch->Read(&record));
    CHECK(record.plan().invocation().step() == step);
    CHECK(record.plan().invocation().layer() == 1);
  }
  const auto refused = admin->WatchPlans(&second, request);
  CHECK_FALSE(refused->Read(&record));
  CHECK(refused->Finish().error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED);
  controller.listener->Stop("over");
  CHECK_FALSE(watch->Read(&record));
  CHECK(watch->Finish().error_code() == grpc::StatusCode::UNAVAILABLE);
}

// Runs concurrent admin calls while a job plans: for the thread sanitizer, and nothing may block the loop.
TEST_CASE("admin calls and a running job do not disturb each other") {
  InProcessController controller;
  auto streams = JoinAll(controller.listener->address(), 2);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < 3; ++caller)
    callers.emplace_back([&] {
      const auto admin = v1::Admin::NewStub(Connect(controller.listener->address()));
      for (int i = 0; i < 30; ++i) {
        for (int call = 0; call < 3; ++call) {
          grpc::ClientContext context;
          v1::ListPlansResponse plans;
          v1::ControllerStatus status;
          if (call == 0) admin->ListPlans(&context, {}, &plans);
          if (call == 1) admin->GetStatus(&context, {}, &status);
          if (call != 2) continue;
          const auto watch = admin->WatchPlans(&context, {});
          watch->WaitForInitialMetadata();
          context.TryCancel();
          v1::PlanRecord record;
          while (watch->Read(&record)) {
          }
          watch->Finish();
        }
      }
    });
  for (int64_t step = 0; step < 100; ++step) RunInvocation(streams, step, 0);
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace lrmoe::test
