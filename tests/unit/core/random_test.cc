// Random orders of events against what must hold in every one of them. A failure names its seed.
#include <algorithm>
#include <catch2/catch.hpp>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <vector>

#include "common/random.h"
#include "controller/core/core.h"
#include "controller/core/plan_content.h"
#include "controller/planner/planner.h"

namespace lrmoe::core {
namespace {

constexpr int32_t kExperts = 4;
constexpr int32_t kLayers = 2;

// What one rank of the simulated job knows and expects.
struct Worker {
  std::optional<SessionId> session;
  bool welcomed = false;
  int64_t position = 0;  // invocations answered with a plan
  bool asked = false;    // counts of `position` are out on this session
};

// A job of workers that call layer after layer, lose their streams, come back, repeat themselves; and a pool
// that plans in random order. Checks every action.
class Simulation {
 public:
  Simulation(uint64_t seed, int32_t num_ranks)
      : random_(seed), core_(Options(num_ranks)), workers_(num_ranks), fate_(seed * 7919) {}

  void Run(int64_t num_invocations) {
    for (int64_t turn = 0; turn < 400 * num_invocations; ++turn) {
      now_us_ += random_.Between(0, 300);
      Turn();
      bool done = true;
      for (const Worker& worker : workers_) done &= worker.position >= num_invocations;
      if (done) {
        finished_ = true;
        return;
      }
    }
  }

  bool finished() const { return finished_; }
  int64_t num_plans() const { return static_cast<int64_t>(plans_.size()); }

 private:
  static CoreOptions Options(int32_t num_ranks) {
    CoreOptions options;
    options.ranks = num_ranks;
    options.reconnect_grace_us = 3'600'000'000;  // streams break all the time here
    options.max_plans_kept = 16;
    return options;
  }
  static Invocation InvocationAt(int64_t position) {
    return {position / kLayers, static_cast<int32_t>(position % kLayers), 0};
  }
  // The same however often it is asked for.
  std::vector<int64_t> CountsAt(int32_t rank, int64_t position) const {
    Random random(fate_ + static_cast<uint64_t>(position * 1000 + rank));
    std::vector<int64_t> counts(kExperts);
    for (int64_t& count : counts) count = random.Between(0, 9);
    return counts;
  }
  // Whether the first attempt at planning it fails.
  bool FailsAt(int64_t position) const {
    return Random(fate_ ^ static_cast<uint64_t>(position)).Below(10) == 0;
  }

  void Turn() {
    const auto rank = static_cast<int32_t>(random_.Below(workers_.size()));
    Worker& worker = workers_[rank];
    switch (random_.Below(8)) {
      case 0:  // the stream breaks, rarely
        if (worker.session.has_value() && random_.Below(6) == 0) {
          closed_.insert(*worker.session);
          const SessionId session = *std::exchange(worker.session, std::nullopt);
          worker.asked = worker.welcomed = false;
          Step(SessionClosed{session, "broke"});
        }
        return;
      case 1:
        Step(Tick{});
        return;
      case 2:
      case 3:
        FinishPlan();
        return;
      default:
        break;
    }
    if (!worker.session.has_value()) {
      Connect(rank);
    } else if (worker.welcomed) {
      Ask(rank);
    }
  }

  void Connect(int32_t rank) {
    Worker& worker = workers_[rank];
    worker.session = SessionId{next_session_++};
    worker.asked = worker.welcomed = false;
    Hello hello{
        .rank_idx = rank, .world_size = static_cast<int32_t>(workers_.size()), .job = "job", .node = "n"};
    hello.epoch = joined_ ? core_.epoch() : Epoch{0};
    Step(SessionOpened{*worker.session});
    Step(SessionMessage{*worker.session, hello});
    ModelSpec model{.num_layers = kLayers};
    model.shape = {.num_experts = kExperts, .top_k = 1, .hidden_size = 8, .intermediate_size = 8};
    Step(SessionMessage{*worker.session, model});
  }

  // Counts of the invocation it is at; sometimes again, sometimes of the one before (recomputation).
  void Ask(int32_t rank) {
    Worker& worker = workers_[rank];
    int64_t position = worker.position;
    if (worker.asked && random_.Below(4) != 0) return;
    if (!worker.asked && position % kLayers == 1 && random_.Below(4) == 0) {
      --position;  // same step: the plan it had must come again
      recomputed_ = {rank, position};
    } else {
      worker.asked = true;
    }
    Step(SessionMessage{*worker.session, SourceCounts{InvocationAt(position), CountsAt(rank, position)}});
    if (recomputed_.has_value()) CHECK(recompute_answered_);
    recomputed_.reset();
    recompute_answered_ = false;
  }

  void FinishPlan() {
    if (jobs_.empty()) return;
    const size_t pick = random_.Below(jobs_.size());
    const StartPlan job = jobs_[pick];
    jobs_.erase(jobs_.begin() + static_cast<std::ptrdiff_t>(pick));
    const int64_t position = job.tag.invocation.step * kLayers + job.tag.invocation.layer;
    if (FailsAt(position) && failed_.insert(position).second) {
      Step(PlanFinished{job.tag, absl::ResourceExhaustedError("no"), 1});
    } else {
      Step(PlanFinished{job.tag, planner::Plan(job.problem), 1});
    }
    if (random_.Below(8) == 0)
      Step(PlanFinished{job.tag, planner::Plan(job.problem), 1});  // stale: changes nothing
  }

  void Step(const Event& event) {
    for (const Action& action : core_.Step(event, now_us_)) Check(action);
  }

  void Check(const Action& action) {
    if (const Send* send = std::get_if<Send>(&action)) {
      for (SessionId session : send->sessions) CheckSent(session, send->message);
    } else if (const StartPlan* start = std::get_if<StartPlan>(&action)) {
      for (const StartPlan& job : jobs_) REQUIRE(job.tag.invocation.layer != start->tag.invocation.layer);
      const int64_t position = start->tag.invocation.step * kLayers + start->tag.invocation.layer;
      for (int32_t rank = 0; rank < static_cast<int32_t>(workers_.size()); ++rank) {
        const auto counts = start->problem.counts.source(rank);
        REQUIRE(std::vector<int64_t>(counts.begin(), counts.end()) == CountsAt(rank, position));
      }
      jobs_.push_back(*start);
    } else if (const CloseSession* close = std::get_if<CloseSession>(&action)) {
      FAIL("closed: " << close->status.ToString());
    }
  }

  void CheckSent(SessionId session, const std::shared_ptr<const ControllerMessage>& message) {
    REQUIRE(!closed_.contains(session));
    const auto worker = std::find_if(workers_.begin(), workers_.end(),
                                     [&](const Worker& each) { return each.session == session; });
    REQUIRE(worker != workers_.end());
    if (std::holds_alternative<Welcome>(*message)) {
      worker->welcomed = joined_ = true;
    } else if (const ExecutionPlan* plan = std::get_if<ExecutionPlan>(message.get())) {
      const auto [at, first] = plans_.try_emplace(plan->plan.invocation, *plan);
      REQUIRE(at->second == *plan);  // the very same on every rank, however often it is asked for
      if (recomputed_.has_value() && plan->plan.invocation == InvocationAt(recomputed_->second)) {
        recompute_answered_ = true;
        return;
      }
      if (!worker->asked) return;  // asked twice, answered twice
      REQUIRE(plan->plan.invocation <= InvocationAt(worker->position));
      if (plan->plan.invocation < InvocationAt(worker->position)) return;
      ++worker->position;
      worker->asked = false;
    } else if (std::holds_alternative<PlanError>(*message)) {
      const auto& error = std::get<PlanError>(*message);
      REQUIRE(error.status == absl::ResourceExhaustedError("no"));
      if (error.invocation == InvocationAt(worker->position)) worker->asked = false;  // it tries again
    } else {
      FAIL("unexpected message");
    }
  }

  Random random_;
  Core core_;
  std::vector<Worker> workers_;
  const uint64_t fate_;
  int64_t now_us_ = 0;
  uint64_t next_session_ = 1;
  bool joined_ = false;
  bool finished_ = false;
  std::set<SessionId> closed_;
  std::deque<StartPlan> jobs_;
  std::set<int64_t> failed_;
  std::map<Invocation, ExecutionPlan> plans_;
  std::optional<std::pair<int32_t, int64_t>> recomputed_;
  bool recompute_answered_ = false;
};

TEST_CASE("whatever the order of events, every rank gets every plan, the same as all others") {
  int64_t plans = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    INFO("seed " << seed);
    Simulation simulation(seed, static_cast<int32_t>(1 + seed % 5));
    simulation.Run(30);
    REQUIRE(simulation.finished());
    plans += simulation.num_plans();
  }
  CHECK(plans == 150 * 30);
}

// Anything at all, from anybody: the core never breaks a check of its own, never talks to a stream that is
// gone, and still serves a job afterwards.
TEST_CASE("nonsense does not break the core") {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    INFO("seed " << seed);
    Random random(seed);
    CoreOptions options;
    options.max_sessions = 8;
    options.max_queued_invocations = 4;
    options.max_plans_kept = 3;
    options.reconnect_grace_us = 1000;
    Core core(options);
    std::set<SessionId> live;
    std::vector<PlanTag> tags;
    std::vector<planner::PlanningProblem> problems;
    int64_t now_us = 0;
    uint64_t next_session = 1;
    const auto step = [&](const Event& event) {
      for (const Action& action : core.Step(event, now_us)) {
        if (const Send* send = std::get_if<Send>(&action))
          for (SessionId session : send->sessions) REQUIRE(live.contains(session));
        if (const CloseSession* close = std::get_if<CloseSession>(&action))
          REQUIRE(live.erase(close->session) == 1);
        if (const StartPlan* start = std::get_if<StartPlan>(&action)) {
          REQUIRE(planner::Plan(start->problem).ok());
          tags.push_back(start->tag);
          problems.push_back(start->problem);
        }
      }
      REQUIRE(core.NextTick() > now_us - 1'000'000'000);
    };
    const auto any_session = [&] { return SessionId{1 + random.Below(next_session)}; };
    for (int turn = 0; turn < 400; ++turn) {
      now_us += random.Between(0, 500);
      switch (random.Below(12)) {
        case 0:
          live.insert(SessionId{next_session});
          step(SessionOpened{SessionId{next_session++}});
          break;
        case 1: {
          const SessionId session = any_session();
          live.erase(session);
          step(SessionClosed{session, "gone"});
          break;
        }
        case 2:
        case 3: {
          Hello hello{.rank_idx = static_cast<int32_t>(random.Below(2)), .world_size = 2, .node = "n"};
          hello.job = random.Below(4) == 0 ? "b" : "a";
          if (random.Below(3) == 0) hello.epoch = core.epoch();
          step(SessionMessage{any_session(), hello});
          break;
        }
        case 4: {
          ModelSpec model{.num_layers = 2};
          model.shape = {.num_experts = random.Below(10) == 0 ? 5 : 4,
                         .top_k = 1,
                         .hidden_size = 8,
                         .intermediate_size = 8};
          step(SessionMessage{any_session(), model});
          break;
        }
        case 5:
        case 6:
        case 7: {
          SourceCounts counts{{random.Between(0, 2), static_cast<int32_t>(random.Below(2)), 0}, {1, 2, 3, 4}};
          if (random.Below(10) == 0) counts.counts.pop_back();
          step(SessionMessage{any_session(), counts});
          break;
        }
        case 8:
          step(SessionMessage{any_session(), Leaving{"x", random.Below(4) == 0}});
          break;
        case 9:
          if (!tags.empty()) {
            const size_t pick = random.Below(tags.size());
            step(PlanFinished{tags[pick], planner::Plan(problems[pick]), 1});
          }
          break;
        case 10:
          step(SetPolicy{{{"rates", random.Below(2) == 0 ? "0.5" : "7"}}});
          break;
        default:
          step(Tick{});
          break;
      }
    }
    while (!live.empty()) {
      const SessionId session = *live.begin();
      live.erase(session);
      step(SessionClosed{session, "gone"});
    }
    for (uint64_t rank = 0; rank < 2; ++rank) {
      const SessionId session{next_session++};
      live.insert(session);
      step(SessionOpened{session});
      step(SessionMessage{
          session,
          Hello{.rank_idx = static_cast<int32_t>(rank), .world_size = 2, .job = "last", .node = "n"}});
    }
    REQUIRE(core.state() == EpochState::kRunning);
  }
}

}  // namespace
}  // namespace lrmoe::core
