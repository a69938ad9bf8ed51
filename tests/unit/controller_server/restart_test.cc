// A server with a store, and the one that comes after it.
#include <catch2/catch.hpp>
#include <cstdlib>
#include <filesystem>
#include <future>

#include "controller/core/what_if.h"
#include "controller/planner/planner.h"
#include "controller/server.h"

namespace lrmoe {
namespace {

constexpr auto kPatience = std::chrono::seconds(30);  // a test that hangs, fails

struct NoSink final : SessionSink {
  void Send(const std::vector<core::SessionId>&, const std::shared_ptr<const ControllerMessage>&) override {}
  void Close(core::SessionId, const absl::Status&) override {}
  void Taken(core::SessionId) override {}
};

// Calls `question` on the loop and returns what it returns.
template <typename Question>
auto Ask(Server& server, Question question) {
  std::promise<decltype(question(std::declval<const Server::View&>()))> answer;
  auto arrived = answer.get_future();
  server.Ask([&](const Server::View& view) { answer.set_value(question(view)); }, [] {});
  REQUIRE(arrived.wait_for(kPatience) == std::future_status::ready);
  return arrived.get();
}

int64_t NumMade(Server& server) {
  return Ask(server, [](const Server::View& view) { return view.history.num_made(); });
}

// One rank, whose invocations are planned one after the other, and who reports each.
core::SessionId Work(Server& server, int64_t steps) {
  const core::SessionId session = server.NewSessionId();
  const auto post = [&](WorkerMessage message) {
    server.Post(core::SessionMessage{session, std::move(message)});
  };
  server.Post(core::SessionOpened{session});
  post(Hello{.rank_idx = 0, .world_size = 1, .job = "job", .node = "n", .replica_slots = 1});
  ModelSpec model{.num_layers = 1};
  model.shape = {.num_experts = 4, .top_k = 1, .hidden_size = 8, .intermediate_size = 8};
  post(model);
  for (int64_t step = 0; step < steps; ++step) {
    const int64_t before = NumMade(server);
    post(SourceCounts{{step, 0, 0}, {step, 3, 1, 2}});
    const Deadline deadline = After(kPatience);
    while (NumMade(server) == before) REQUIRE(std::chrono::steady_clock::now() < deadline);
    post(InvocationReport{.invocation = {step, 0, 0}, .routed_rows = step + 6});
  }
  return session;
}

struct Controller {
  explicit Controller(const std::string& directory) {
    ServerOptions options;
    options.max_loop_plan_us = 10'000;
    auto opened = store::Store::Open({.directory = directory}, &options.core.policy);
    REQUIRE(opened.ok());
    store = *std::move(opened);
    server.emplace(options, planner::Plan, store.get());
    REQUIRE(server->Restore().ok());
    server->Start(&sink);
  }
  NoSink sink;
  std::unique_ptr<store::Store> store;
  std::optional<Server> server;
};

TEST_CASE("a server goes on where the one before it ended") {
  std::string directory = (std::filesystem::temp_directory_path() / "lrmoe-server-XXXXXX").string();
  REQUIRE(mkdtemp(directory.data()) != nullptr);
  {
    Controller first(directory);
    const core::SessionId session = Work(*first.server, 20);
    first.server->Post(core::SessionMessage{session, Leaving{}});
    std::promise<bool> set;
    first.server->SetPolicy({{"seed", "5"}},
                            [&](absl::StatusOr<PolicyChange> change) { set.set_value(change.ok()); });
    CHECK(set.get_future().get());
    first.server->Stop("over");
    CHECK(first.store->Close(After(kPatience)).ok());
    CHECK(first.store->state().lost == 0);
  }
  {
    Controller second(directory);
    const auto check = [](const Server::View& view) {
      CHECK(view.store->state().error.empty());
      CHECK(view.core.epoch() == Epoch{1});
      CHECK(view.core.state() == core::EpochState::kEnded);
      CHECK(view.core.newest_policy().seed == 5);
      CHECK(view.core.model()->shape.num_experts == 4);
      const core::PlanRecord* record = view.history.FindLatest(0);
      REQUIRE(record != nullptr);
      CHECK(record->number == 20);
      CHECK(record->reports.at(0).routed_rows == 25);
      CHECK(view.core.current_step() == 19);
      CHECK(core::MakeWhatIfProblem(view.core, view.history, *record, {}).ok());
      return view.history.num_made();
    };
    CHECK(Ask(*second.server, check) == 20);
    Work(*second.server, 1);
    CHECK(Ask(*second.server, [](const Server::View& view) { return view.core.epoch(); }) == Epoch{2});
    second.server->Stop("over");
    CHECK(second.store->Close(After(kPatience)).ok());
  }
  Controller third(directory);
  const auto check = [](const Server::View& view) {
    CHECK(view.core.epoch() == Epoch{2});
    CHECK(view.core.state() == core::EpochState::kAborted);
    CHECK(view.core.reason() == "over");
    CHECK(view.history.FindLatest(0)->reports.at(0).routed_rows == 6);
    CHECK(view.history.FindLatest(0)->number == 21);
    return view.history.num_made();
  };
  CHECK(Ask(*third.server, check) == 21);
  third.server->Stop("over");
  third.store.reset();
  std::filesystem::remove_all(directory);
}

}  // namespace
}  // namespace lrmoe
