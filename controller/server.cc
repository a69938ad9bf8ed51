#include "controller/server.h"

#include <time.h>

#include <algorithm>
#include <chrono>
#include <limits>
#include <type_traits>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/logging.h"
#include "common/status_macros.h"

namespace lrmoe {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::steady_clock;

int64_t UnixMilliseconds() {
  return duration_cast<std::chrono::milliseconds>(std::chrono::system_clock::now().time_since_epoch())
      .count();
}

void WriteLog(const core::Log& log) {
  switch (log.severity) {
    case core::Severity::kInfo:
      LogInfo(log.text);
      return;
    case core::Severity::kWarning:
      LogWarning(log.text);
      return;
    case core::Severity::kError:
      LogError(log.text);
      return;
  }
}

// Of this thread: that another one was given the processor meanwhile does not make a plan a slow one.
double ProcessorMicroseconds() {
  timespec time{};
  LRMOE_CHECK(clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time) == 0);
  return static_cast<double>(time.tv_sec) * 1e6 + static_cast<double>(time.tv_nsec) / 1e3;
}

absl::Status Stopping() {
  return absl::UnavailableError("the controller is stopping");
}

}  // namespace

absl::Status Validate(const ServerOptions& options) {
  LRMOE_RETURN_IF_ERROR(core::Validate(options.core));
  if (options.planning_threads < 1 || options.planning_threads > 16)
    return absl::InvalidArgumentError(
        absl::StrCat("planning_threads is ", options.planning_threads, "; allowed: 1..16"));
  if (options.max_loop_plan_us < 0 || options.max_loop_plan_us > 10000)
    return absl::InvalidArgumentError(
        absl::StrCat("max_loop_plan_us is ", options.max_loop_plan_us, "; allowed: 0..10000"));
  if (options.max_watchers < 0 || options.max_watchers > 1024)
    return absl::InvalidArgumentError(
        absl::StrCat("max_watchers is ", options.max_watchers, "; allowed: 0..1024"));
  if (options.max_simulations < 0 || options.max_simulations > 1024)
    return absl::InvalidArgumentError(
        absl::StrCat("max_simulations is ", options.max_simulations, "; allowed: 0..1024"));
  return absl::OkStatus();
}

Server::Server(const ServerOptions& options, PlanFunction plan, store::Store* store)
    : options_(options),
      plan_(std::move(plan)),
      store_(store),
      core_(options.core),
      history_(options.core.max_plans_kept, options.core.max_plan_bytes_kept),
      place_(options.max_loop_plan_us) {
  LRMOE_CHECK(Validate(options).ok());
}

Server::~Server() {
  Stop("controller stopping");
}

absl::Status Server::Restore() {
  LRMOE_CHECK(store_ != nullptr && sink_ == nullptr);
  LRMOE_ASSIGN_OR_RETURN(const store::Store::Restored restored, store_->Load(&history_));
  bool more = false;
  const auto newest = history_.List({.limit = 1}, &more);
  const bool of_epoch = !newest.empty() && newest.front()->epoch == restored.epoch.epoch;
  core_.Restore(restored.epoch, restored.next_epoch,
                of_epoch ? newest.front()->plan->plan.invocation.step : 0);
  return absl::OkStatus();
}

void Server::Start(SessionSink* sink) {
  LRMOE_CHECK(sink_ == nullptr);
  sink_ = sink;
  started_ = steady_clock::now();
  loop_ = std::thread([this] { RunLoop(); });
  for (int32_t i = 0; i < options_.planning_threads; ++i) planners_.emplace_back([this] { RunPlanner(); });
  simulations_stopped_ = false;
  simulator_ = std::thread([this] { RunSimulator(); });
}

void Server::Stop(const std::string& reason) {
  std::lock_guard stopping(stop_mutex_);
  if (!loop_.joinable()) return;
  Post(core::Stop{reason});
  loop_.join();  // ends after the Stop event
  {
    std::lock_guard lock(jobs_mutex_);
    jobs_stopped_ = true;
  }
  jobs_ready_.notify_all();
  for (std::thread& planner : planners_) planner.join();
  planners_.clear();
  {
    std::lock_guard lock(simulations_mutex_);
    simulations_stopped_ = true;
  }
  simulations_ready_.notify_all();
  simulator_.join();
}

core::SessionId Server::NewSessionId() {
  return core::SessionId{next_session_.fetch_add(1)};
}

void Server::Post(core::Event event) {
  Enqueue(std::move(event));
}

void Server::Ask(std::function<void(const View&)> question, std::function<void()> refused) {
  Enqueue(Question{std::move(question), std::move(refused)});
}

void Server::SetPolicy(std::vector<std::pair<std::string, std::string>> fields, PolicyDone done) {
  Enqueue(PolicyRequest{{std::move(fields)}, std::move(done)});
}

void Server::Simulate(planner::PlanningProblem problem, std::function<void(absl::StatusOr<LayerPlan>)> done) {
  {
    std::unique_lock lock(simulations_mutex_);
    if (simulations_stopped_) {
      lock.unlock();
      return done(Stopping());
    }
    if (simulations_.size() >= static_cast<size_t>(options_.max_simulations)) {
      lock.unlock();
      return done(absl::ResourceExhaustedError(absl::StrCat("simulations that wait are ",
                                                            options_.max_simulations + 1, "; allowed: 0..",
                                                            options_.max_simulations)));
    }
    simulations_.push_back({std::move(problem), std::move(done)});
  }
  simulations_ready_.notify_one();
}

void Server::Watch(std::shared_ptr<PlanWatcher> watcher) {
  Enqueue(WatchRequest{std::move(watcher), true});
}

void Server::Unwatch(std::shared_ptr<PlanWatcher> watcher) {
  Enqueue(WatchRequest{std::move(watcher), false});
}

void Server::Enqueue(Work work) {
  std::unique_lock lock(queue_mutex_);
  if (stopped_) {
    lock.unlock();
    Drop(std::move(work));
    return;
  }
  queue_.push_back(std::move(work));
  const bool first = queue_.size() == 1;  // else the loop is awake or woken already
  lock.unlock();
  if (first) queue_ready_.notify_one();
}

// Whoever asked gets an answer even when there is nobody to give one.
void Server::Drop(Work work) {
  if (Question* question = std::get_if<Question>(&work)) {
    question->refused();
  } else if (PolicyRequest* request = std::get_if<PolicyRequest>(&work)) {
    request->done(Stopping());
  } else if (WatchRequest* watch = std::get_if<WatchRequest>(&work)) {
    if (watch->watch) watch->watcher->OnEnd(Stopping());
  }
}

int64_t Server::NowMicroseconds() const {
  return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

void Server::RunLoop() {
  std::deque<Work> taken;
  while (!core_stopped_) {
    {
      std::unique_lock lock(queue_mutex_);
      const auto ready = [this] { return !queue_.empty(); };
      const int64_t next = core_.NextTick();
      if (next == std::numeric_limits<int64_t>::max()) {
        queue_ready_.wait(lock, ready);  // Stop posts an event
      } else {
        queue_ready_.wait_until(lock, steady_clock::time_point(microseconds(next)), ready);
      }
      taken.swap(queue_);
    }
    if (core_.NextTick() <= NowMicroseconds()) Step(core::Tick{});
    for (; !taken.empty() && !core_stopped_; taken.pop_front()) Do(std::move(taken.front()));
  }
  {
    std::lock_guard lock(queue_mutex_);
    stopped_ = true;
    std::move(queue_.begin(), queue_.end(), std::back_inserter(taken));
    queue_.clear();
  }
  for (Work& work : taken) Drop(std::move(work));
  for (const auto& watcher : std::exchange(watchers_, {})) watcher->OnEnd(Stopping());
}

void Server::Do(Work work) {
  if (core::Event* event = std::get_if<core::Event>(&work)) {
    Step(*event);
    if (const auto* message = std::get_if<core::SessionMessage>(event)) sink_->Taken(message->session);
    if (const auto* invalid = std::get_if<core::SessionInvalid>(event)) sink_->Taken(invalid->session);
    core_stopped_ = std::holds_alternative<core::Stop>(*event);
  } else if (Question* question = std::get_if<Question>(&work)) {
    const int64_t uptime_us = duration_cast<microseconds>(steady_clock::now() - started_).count();
    question->ask({core_, history_, store_, NowMicroseconds(), uptime_us});
  } else if (PolicyRequest* request = std::get_if<PolicyRequest>(&work)) {
    policy_done_ = std::move(request->done);
    Step(request->event);
    policy_done_ = nullptr;
  } else if (WatchRequest* watch = std::get_if<WatchRequest>(&work)) {
    if (!watch->watch) {
      std::erase(watchers_, watch->watcher);
    } else if (watchers_.size() >= static_cast<size_t>(options_.max_watchers)) {
      watch->watcher->OnEnd(absl::ResourceExhaustedError(
          absl::StrCat("plan watchers are ", watchers_.size() + 1, "; allowed: 0..", options_.max_watchers)));
    } else {
      watchers_.push_back(std::move(watch->watcher));
    }
  }
}

void Server::Step(const core::Event& event) {
  for (core::Action& action : core_.Step(event, NowMicroseconds())) Carry(action);
  // A plan that is made here may let the next one of its layer begin.
  while (!loop_jobs_.empty()) {
    const core::StartPlan job = std::move(loop_jobs_.front());
    loop_jobs_.pop_front();
    for (core::Action& action : core_.Step(Make(job), NowMicroseconds())) Carry(action);
  }
  if (store_ != nullptr) RecordEpoch();
}

void Server::Carry(core::Action& action) {
  std::visit(
      [this](auto& value) {
        using T = std::decay_t<decltype(value)>;
        if constexpr (std::is_same_v<T, core::Send>) {
          sink_->Send(value.sessions, value.message);
        } else if constexpr (std::is_same_v<T, core::CloseSession>) {
          sink_->Close(value.session, value.status);
        } else if constexpr (std::is_same_v<T, core::StartPlan>) {
          StartPlanning(std::move(value));
        } else if constexpr (std::is_same_v<T, core::RecordPlan>) {
          Record({.epoch = value.epoch, .plan = std::move(value.plan), .routed_rows = value.routed_rows});
        } else if constexpr (std::is_same_v<T, core::RecordFailure>) {
          auto plan = std::make_shared<ExecutionPlan>();
          plan->plan.invocation = value.invocation;
          plan->plan.feasible = false;
          Record({.epoch = core_.epoch(),
                  .plan = std::move(plan),
                  .error = std::string(value.status.message())});
        } else if constexpr (std::is_same_v<T, core::RecordReport>) {
          RecordReport(value);
        } else if constexpr (std::is_same_v<T, core::PolicyOutcome>) {
          if (store_ != nullptr && value.change.ok()) store_->SetPolicy(value.change->policy);
          if (policy_done_) policy_done_(std::move(value.change));
        } else {
          static_assert(std::is_same_v<T, core::Log>);
          WriteLog(value);
        }
      },
      action);
}

void Server::Record(core::PlanRecord record) {
  record.planned_at_ms = UnixMilliseconds();
  const core::PlanRecord& kept = history_.Add(std::move(record));
  if (store_ != nullptr) store_->AddPlan(kept, history_);
  for (const auto& watcher : watchers_) watcher->OnPlan(kept);
}

void Server::RecordReport(const core::RecordReport& report) {
  const core::PlanRecord* kept = history_.AddReport(report.rank_idx, report.report);
  // Null: its plan is no longer kept, so there is nothing to add it to.
  if (store_ != nullptr && kept != nullptr)
    store_->AddReport(*kept, report.rank_idx, report.report, history_);
}

// Once it has begun, and when it or its model became another. Until the next one begins, the last one stays.
void Server::RecordEpoch() {
  if (core_.state() == core::EpochState::kWaiting) return;
  const auto now = std::tuple(core_.epoch(), core_.state(), core_.model().has_value());
  if (now == epoch_recorded_) return;
  epoch_recorded_ = now;
  store_->SetEpoch(core_.epoch_record());
}

void Server::StartPlanning(core::StartPlan job) {
  {
    std::lock_guard lock(jobs_mutex_);
    if (place_.OnLoop(job.tag.invocation.layer, job.problem)) {
      loop_jobs_.push_back(std::move(job));
      return;
    }
    jobs_.push_back(std::move(job));
  }
  jobs_ready_.notify_one();
}

core::PlanFinished Server::Make(const core::StartPlan& job) {
  const auto begin = steady_clock::now();
  const double cpu_begin_us = ProcessorMicroseconds();
  absl::StatusOr<LayerPlan> plan = plan_(job.problem);
  const double plan_us = std::chrono::duration<double, std::micro>(steady_clock::now() - begin).count();
  const double cpu_us = ProcessorMicroseconds() - cpu_begin_us;
  std::lock_guard lock(jobs_mutex_);
  place_.Took(job.tag.invocation.layer, job.problem, cpu_us);
  return {job.tag, std::move(plan), plan_us};
}

void Server::RunPlanner() {
  while (true) {
    std::unique_lock lock(jobs_mutex_);
    jobs_ready_.wait(lock, [this] { return jobs_stopped_ || !jobs_.empty(); });  // Stop wakes it
    if (jobs_stopped_) return;
    const core::StartPlan job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    Post(Make(job));
  }
}

void Server::RunSimulator() {
  while (true) {
    std::unique_lock lock(simulations_mutex_);
    simulations_ready_.wait(lock, [this] { return simulations_stopped_ || !simulations_.empty(); });
    if (simulations_stopped_) break;  // Stop wakes it
    const Simulation job = std::move(simulations_.front());
    simulations_.pop_front();
    lock.unlock();
    const auto begin = steady_clock::now();
    absl::StatusOr<LayerPlan> plan = plan_(job.problem);
    if (plan.ok())
      plan->plan_us = std::chrono::duration<double, std::micro>(steady_clock::now() - begin).count();
    job.done(std::move(plan));
  }
  for (const Simulation& job : std::exchange(simulations_, {})) job.done(Stopping());
}

}  // namespace lrmoe
