// The agent with invented time: every test says what happens when, and compares the actions.
#include "worker/agent/agent.h"

#include <catch2/catch.hpp>
#include <set>
#include <string>
#include <vector>

namespace lrmoe::agent {
namespace {

constexpr int64_t kSecond = 1000000;

Options TestOptions() {
  Options options;
  options.controller = "head:7070";
  options.hello = {.rank_idx = 1, .world_size = 2, .job = "j", .node = "n"};
  options.seed = 7;
  return options;
}

// Feeds events and keeps the actions of the last one.
struct Story {
  explicit Story(Options options = TestOptions()) : agent(std::move(options), 0) {}
  std::vector<Action> At(int64_t now_us, Event event) {
    std::vector<Action> actions;
    agent.Step(now_us, event, actions);
    return actions;
  }
  // A session of epoch 4 from time 0 on.
  void Join(int64_t now_us = 0) {
    At(now_us, Tick{});
    At(now_us, StreamOpened{});
    At(now_us, Received{Welcome{.epoch = Epoch{4}}});
    REQUIRE(agent.welcomed());
  }
  Agent agent;
};

template <typename T>
std::vector<T> Only(const std::vector<Action>& actions) {
  std::vector<T> found;
  for (const Action& action : actions) {
    if (const T* match = std::get_if<T>(&action)) found.push_back(*match);
  }
  return found;
}

template <typename T>
std::vector<T> Sent(const std::vector<Action>& actions) {
  std::vector<T> found;
  for (const Send& send : Only<Send>(actions)) {
    if (const T* match = std::get_if<T>(&send.message)) found.push_back(*match);
  }
  return found;
}

SourceCounts CountsOf(int64_t step) {
  return {{.step = step, .layer = 2, .micro_batch = 0}, {3, 0, step}};
}

ExecutionPlan PlanOf(int64_t step) {
  ExecutionPlan plan;
  plan.plan.invocation = CountsOf(step).invocation;
  return plan;
}

TEST_CASE("the first step opens a stream that starts with Hello", "[agent]") {
  Story story;
  const auto actions = story.At(0, Tick{});
  REQUIRE(actions.size() == 2);
  CHECK(std::holds_alternative<OpenStream>(actions[0]));
  REQUIRE(Sent<Hello>(actions).size() == 1);
  CHECK(Sent<Hello>(actions)[0] == TestOptions().hello);
  CHECK(story.At(1, Tick{}).empty());
}

TEST_CASE("attempts back off with jitter, doubling, and are the same for the same seed", "[agent]") {
  std::vector<int64_t> first;
  for (int run = 0; run < 2; ++run) {
    Story story;
    std::vector<int64_t> waits;
    int64_t now = 0;
    story.At(now, Tick{});
    for (int attempt = 0; attempt < 8; ++attempt) {
      story.At(now, StreamClosed{absl::UnavailableError("refused")});
      const int64_t wake = story.agent.next_wake_us();
      waits.push_back(wake - now);
      CHECK(Only<OpenStream>(story.At(wake - 1, Tick{})).empty());
      CHECK(Only<OpenStream>(story.At(wake, Tick{})).size() == 1);
      now = wake;
    }
    int64_t longest = TestOptions().first_backoff_us;
    for (int64_t wait : waits) {
      CHECK(wait >= longest / 2);
      CHECK(wait <= longest);
      longest = std::min(longest * 2, TestOptions().max_backoff_us);
    }
    if (run == 0) first = waits;
    CHECK(first == waits);
  }
  Options other = TestOptions();
  other.seed = 8;
  Story story(other);
  story.At(0, Tick{});
  story.At(0, StreamClosed{absl::UnavailableError("")});
  CHECK(story.agent.next_wake_us() != first[0]);
}

TEST_CASE("it gives up after controller_timeout without a stream, naming the controller", "[agent]") {
  Story story;
  story.At(0, Tick{});
  int64_t now = 0;
  std::vector<EndEpoch> ends;
  while (ends.empty() && now < 60 * kSecond) {
    const auto closed = story.At(now, StreamClosed{absl::UnavailableError("connection refused")});
    const int64_t wake = story.agent.next_wake_us();
    REQUIRE(wake > now);
    now = wake;
    ends = Only<EndEpoch>(story.At(now, Tick{}));
  }
  CHECK(now == 5 * kSecond);
  REQUIRE(ends.size() == 1);
  CHECK(ends[0].kind == EndKind::kControllerLost);
  CHECK(ends[0].reason ==
        "no session with the controller at head:7070 for 5.0 s (last attempt: connection refused)");
  CHECK(story.agent.next_wake_us() == kNever);
}

TEST_CASE("an attempt that hangs is covered by the same limit", "[agent]") {
  Story story;
  story.At(0, Tick{});
  CHECK(story.agent.next_wake_us() == 5 * kSecond);
  CHECK(Only<EndEpoch>(story.At(5 * kSecond - 1, Tick{})).empty());
  CHECK(Only<EndEpoch>(story.At(5 * kSecond, Tick{})).size() == 1);
}

TEST_CASE("waiting for the other ranks is not being out of contact", "[agent]") {
  Story story;
  story.At(0, Tick{});
  story.At(kSecond, StreamOpened{});
  CHECK(story.agent.next_wake_us() == kNever);
  CHECK(story.At(1000 * kSecond, Tick{}).empty());
  // The stream breaks before the welcome: the second already spent counts, the 999 in contact do not.
  story.At(1000 * kSecond, StreamClosed{absl::UnavailableError("reset")});
  const int64_t limit = 1004 * kSecond;
  while (story.agent.next_wake_us() < limit) {
    const int64_t wake = story.agent.next_wake_us();
    CHECK(Only<EndEpoch>(story.At(wake, Tick{})).empty());
    story.At(wake, StreamClosed{absl::UnavailableError("reset")});
  }
  CHECK(Only<EndEpoch>(story.At(limit, Tick{})).size() == 1);
}

TEST_CASE("a server that opens streams and never welcomes does not keep it trying for ever", "[agent]") {
  Story story;
  int64_t now = 0;
  std::vector<EndEpoch> ends;
  story.At(now, Tick{});
  while (ends.empty() && now < 100 * kSecond) {
    story.At(now + 1000, StreamOpened{});
    auto actions = story.At(now + 1001, StreamClosed{absl::CancelledError("reset")});
    now = story.agent.next_wake_us();
    ends = Only<EndEpoch>(story.At(now, Tick{}));
  }
  REQUIRE(ends.size() == 1);
  CHECK(ends[0].kind == EndKind::kControllerLost);
}

TEST_CASE("a refusal ends it at once with the controller's words", "[agent]") {
  Story story;
  story.At(0, Tick{});
  story.At(0, StreamOpened{});
  const auto ends = Only<EndEpoch>(story.At(
      1, StreamClosed{absl::InvalidArgumentError("hello.world_size: 2, this controller expects 8")}));
  REQUIRE(ends.size() == 1);
  CHECK(ends[0].kind == EndKind::kRefused);
  CHECK(ends[0].reason ==
        "the controller at head:7070 refused this worker: hello.world_size: 2, this controller expects 8");
}

TEST_CASE("an invalid message ends it", "[agent]") {
  Story story;
  story.Join();
  const auto actions = story.At(1, ReceivedInvalid{absl::InvalidArgumentError("plan.quota: 3 values")});
  REQUIRE(Only<EndEpoch>(actions).size() == 1);
  CHECK(Only<EndEpoch>(actions)[0].kind == EndKind::kRefused);
}

TEST_CASE("counts go out at once when welcomed, and the plan comes back once", "[agent]") {
  Story story;
  story.Join();
  CHECK(Sent<SourceCounts>(story.At(10, PlanWanted{CountsOf(1)})) == std::vector{CountsOf(1)});
  const auto delivered = Only<DeliverPlan>(story.At(20, Received{PlanOf(1)}));
  REQUIRE(delivered.size() == 1);
  CHECK(delivered[0].plan == PlanOf(1));
  CHECK(story.At(30, Received{PlanOf(1)}).empty());
}

TEST_CASE("counts wait for the welcome", "[agent]") {
  Story story;
  story.At(0, Tick{});
  CHECK(story.At(1, PlanWanted{CountsOf(1)}).empty());
  CHECK(story.At(2, ModelKnown{ModelSpec{.num_layers = 3}}).empty());
  story.At(3, StreamOpened{});
  const auto actions = story.At(4, Received{Welcome{.epoch = Epoch{4}}});
  const auto sends = Only<Send>(actions);
  REQUIRE(sends.size() == 2);
  CHECK(std::holds_alternative<ModelSpec>(sends[0].message));  // before the counts
  CHECK(Sent<SourceCounts>(actions) == std::vector{CountsOf(1)});
}

TEST_CASE("a reconnect resumes the epoch and sends again what is still awaited, nothing else", "[agent]") {
  Story story;
  story.Join();
  story.At(1, ModelKnown{ModelSpec{.num_layers = 3}});
  for (int64_t step : {1, 2, 3, 4}) story.At(10 + step, PlanWanted{CountsOf(step)});
  story.At(20, Received{PlanOf(2)});
  story.At(21, PlanAbandoned{CountsOf(3).invocation});
  story.At(30, StreamClosed{absl::UnavailableError("connection reset")});
  CHECK(story.At(31, Measured{InvocationReport{.routed_rows = 9}}).empty());
  const int64_t wake = story.agent.next_wake_us();
  const auto again = Sent<Hello>(story.At(wake, Tick{}));
  REQUIRE(again.size() == 1);
  CHECK(again[0].epoch == Epoch{4});
  story.At(wake, StreamOpened{});
  const auto actions = story.At(wake + 5, Received{Welcome{.epoch = Epoch{4}}});
  CHECK(Sent<SourceCounts>(actions) == std::vector{CountsOf(1), CountsOf(4)});
  CHECK(Sent<ModelSpec>(actions).size() == 1);
  REQUIRE(Sent<InvocationReport>(actions).size() == 1);
  CHECK(Sent<InvocationReport>(actions)[0].routed_rows == 9);
  CHECK(Only<DeliverPlan>(story.At(wake + 6, Received{PlanOf(4)})).size() == 1);
}

TEST_CASE("another epoch after a reconnect means this one is over", "[agent]") {
  Story story;
  story.Join();
  story.At(1, PlanWanted{CountsOf(1)});
  story.At(2, StreamClosed{absl::UnavailableError("")});
  const int64_t wake = story.agent.next_wake_us();
  story.At(wake, Tick{});
  story.At(wake, StreamOpened{});
  const auto actions = story.At(wake, Received{Welcome{.epoch = Epoch{5}}});
  REQUIRE(Only<EndEpoch>(actions).size() == 1);
  CHECK(Only<EndEpoch>(actions)[0].kind == EndKind::kAborted);
  REQUIRE(Only<DeliverError>(actions).size() == 1);
  CHECK(Only<DeliverError>(actions)[0].status.code() == absl::StatusCode::kUnavailable);
}

TEST_CASE("a plan error reaches the waiter and ends nothing", "[agent]") {
  Story story;
  story.Join();
  story.At(1, PlanWanted{CountsOf(1)});
  const auto actions = story.At(
      2, Received{PlanError{CountsOf(1).invocation, absl::ResourceExhaustedError("rank 0: memory")}});
  REQUIRE(actions.size() == 1);
  REQUIRE(Only<DeliverError>(actions).size() == 1);
  CHECK(Only<DeliverError>(actions)[0].status == absl::ResourceExhaustedError("rank 0: memory"));
  CHECK(story.agent.welcomed());
}

TEST_CASE("an abort ends the epoch once, with its reason, for those who wait and those who come later",
          "[agent]") {
  Story story;
  story.Join();
  story.At(1, PlanWanted{CountsOf(1)});
  const auto actions = story.At(2, Received{Abort{"rank 0 left: out of memory"}});
  const std::string reason = "the controller ended epoch 4: rank 0 left: out of memory";
  REQUIRE(Only<EndEpoch>(actions).size() == 1);
  CHECK(Only<EndEpoch>(actions)[0].reason == reason);
  REQUIRE(Only<DeliverError>(actions).size() == 1);
  CHECK(Only<DeliverError>(actions)[0].status == absl::UnavailableError(reason));
  CHECK(story.At(3, Received{Abort{"again"}}).empty());
  CHECK(story.At(4, StreamClosed{absl::OkStatus()}).empty());
  const auto late = Only<DeliverError>(story.At(5, PlanWanted{CountsOf(2)}));
  REQUIRE(late.size() == 1);
  CHECK(late[0].status == absl::UnavailableError(reason));
  CHECK(Only<Left>(story.At(6, LeaveWanted{})).size() == 1);
}

TEST_CASE("heartbeats carry the newest step while welcomed", "[agent]") {
  Story story;
  story.Join();
  CHECK(story.agent.next_wake_us() == kSecond);
  story.At(10, PlanWanted{CountsOf(12)});
  const auto actions = story.At(kSecond, Tick{});
  REQUIRE(Sent<Heartbeat>(actions).size() == 1);
  CHECK(Sent<Heartbeat>(actions)[0].current_step == 12);
  CHECK(story.agent.next_wake_us() == 2 * kSecond);
}

TEST_CASE("leaving sends the reason, closes, and is done when the stream ends", "[agent]") {
  Story story;
  story.Join();
  story.At(1, PlanWanted{CountsOf(1)});
  const Leaving leaving{.reason = "training process was killed by signal 9", .failed = true};
  const auto actions = story.At(2, LeaveWanted{leaving});
  CHECK(Sent<Leaving>(actions) == std::vector{leaving});
  CHECK(Only<CloseStream>(actions).size() == 1);
  CHECK(Only<DeliverError>(actions).size() == 1);
  CHECK(Only<Left>(actions).empty());
  CHECK(story.At(3, Received{Abort{"echo"}}).empty());
  CHECK(Only<Left>(story.At(4, StreamClosed{absl::OkStatus()})).size() == 1);
}

TEST_CASE("a controller that does not answer a Leaving is not waited for beyond the limit", "[agent]") {
  Story story;
  story.Join();
  story.At(2, LeaveWanted{});
  CHECK(story.agent.next_wake_us() == 2 + kSecond);
  CHECK(Only<Left>(story.At(2 + kSecond, Tick{})).size() == 1);
  CHECK(story.At(3 + kSecond, StreamClosed{absl::OkStatus()}).empty());
}

TEST_CASE("leaving without a stream is done at once", "[agent]") {
  Story story;
  CHECK(Only<Left>(story.At(0, LeaveWanted{})).size() == 1);
  CHECK(story.At(kSecond, Tick{}).empty());
}

TEST_CASE("reports queued without a session are bounded; the oldest go", "[agent]") {
  Story story;
  story.At(0, Tick{});
  for (size_t i = 0; i < kMaxQueuedReports + 3; ++i) {
    story.At(1, Measured{InvocationReport{.routed_rows = static_cast<int64_t>(i)}});
  }
  const auto sent = Sent<InvocationReport>(story.At(2, Received{Welcome{.epoch = Epoch{1}}}));
  REQUIRE(sent.size() == kMaxQueuedReports);
  CHECK(sent.front().routed_rows == 3);
}

// Random histories. What must hold in each: every wanted plan is answered exactly once unless abandoned, the
// epoch ends at most once, nothing but Hello is sent before a welcome, nothing at all after the end, and
// after each welcome exactly the unanswered counts are out. The checker below keeps its own, much simpler
// books.
TEST_CASE("random histories keep the promises of the session", "[agent]") {
  int64_t welcomes = 0, ends = 0;
  for (uint64_t seed = 0; seed < 3000; ++seed) {
    CAPTURE(seed);
    Random random(seed);
    Story story;
    std::set<int64_t> waiting;  // steps whose plan the engine waits for
    bool welcomed = false, ended = false;
    int64_t now = 0, next_step = 1;
    for (int i = 0; i < 60; ++i) {
      now += random.Between(0, 400000);
      Event event = Tick{};
      const bool open = welcomed;
      std::set<int64_t> resent_wanted;
      switch (random.Below(12)) {
        case 0:
          event = StreamOpened{};
          break;
        case 1:
          event = StreamClosed{absl::UnavailableError("x")};
          welcomed = false;
          break;
        case 2:
        case 3:
          if (!ended) welcomed = true;
          resent_wanted = waiting;
          event = Received{Welcome{.epoch = Epoch{4}}};
          ++welcomes;
          break;
        case 4:
        case 5:
        case 6:
          event = PlanWanted{CountsOf(next_step)};
          waiting.insert(next_step++);
          break;
        case 7:
        case 8:
          event = Received{PlanOf(random.Between(1, next_step))};
          break;
        case 9:
          if (!waiting.empty()) {
            event = PlanAbandoned{CountsOf(*waiting.begin()).invocation};
            waiting.erase(waiting.begin());
          }
          break;
        case 10:
          if (random.Below(20) == 0) event = Received{Abort{"x"}};
          break;
        default:
          break;
      }
      const auto actions = story.At(now, event);
      std::set<int64_t> resent;
      for (const Action& action : actions) {
        if (const auto* plan = std::get_if<DeliverPlan>(&action)) {
          CHECK(waiting.erase(plan->plan.plan.invocation.step) == 1);
        } else if (const auto* error = std::get_if<DeliverError>(&action)) {
          CHECK(waiting.erase(error->invocation.step) == 1);
        } else if (const auto* send = std::get_if<Send>(&action)) {
          CHECK(!ended);
          if (!std::holds_alternative<Hello>(send->message)) CHECK(welcomed);
          if (const auto* counts = std::get_if<SourceCounts>(&send->message))
            resent.insert(counts->invocation.step);
        } else if (std::holds_alternative<EndEpoch>(action)) {
          CHECK(!ended);
          ended = true;
          welcomed = false;
          ++ends;
        }
      }
      if (!ended && welcomed && !open) CHECK(resent == resent_wanted);
      CHECK(story.agent.welcomed() == welcomed);
      if (ended) CHECK(waiting.empty());
    }
  }
  CHECK(welcomes > 1000);
  CHECK(ends > 100);
}

}  // namespace
}  // namespace lrmoe::agent
