#include "tests/scenario/core/story.h"

#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/check.h"

namespace lrmoe::test {
namespace {

int64_t Number(const std::map<std::string, std::string>& values, const std::string& key, int64_t otherwise) {
  const auto found = values.find(key);
  if (found == values.end()) return otherwise;
  int64_t number = 0;
  LRMOE_CHECK(absl::SimpleAtoi(found->second, &number));
  return number;
}

std::string Text(const std::map<std::string, std::string>& values, const std::string& key,
                 std::string otherwise) {
  const auto found = values.find(key);
  return found == values.end() ? otherwise : found->second;
}

// The words from `first` on, as a sentence.
std::string Sentence(const std::vector<std::string>& words, size_t first) {
  if (words.size() <= first) return "";
  return absl::StrJoin(words.begin() + static_cast<std::ptrdiff_t>(first), words.end(), " ");
}

core::SessionId Session(const std::string& word) {
  uint64_t number = 0;
  LRMOE_CHECK(absl::SimpleAtoi(word, &number));
  return core::SessionId{number};
}

Invocation InvocationOf(const std::map<std::string, std::string>& values) {
  return {Number(values, "step", 0), static_cast<int32_t>(Number(values, "layer", 0)),
          static_cast<int32_t>(Number(values, "mb", 0))};
}

std::string Brief(const Invocation& invocation) {
  return absl::StrCat(invocation.step, "/", invocation.layer, "/", invocation.micro_batch);
}

// Every expert's rows at its owner; "replica=E:R" puts a replica without rows of expert E on rank R.
LayerPlan OwnersPlan(const planner::PlanningProblem& problem, const std::string& replica) {
  LayerPlan plan;
  plan.policy = "test";
  const int32_t num_ranks = problem.counts.num_sources();
  plan.ranks.resize(num_ranks);
  for (int32_t expert = 0; expert < problem.counts.num_experts(); ++expert) {
    InstancePlan instance{.expert_idx = expert, .rank_idx = problem.owner[expert], .owner = true};
    for (int32_t source = 0; source < num_ranks; ++source) {
      instance.forward_rows_by_source.push_back(problem.counts.at(source, expert));
      instance.forward_rows += problem.counts.at(source, expert);
    }
    instance.backward_rows = instance.forward_rows;
    plan.quota.push_back(instance.forward_rows);
    plan.instances.push_back(instance);
    if (!replica.empty() && replica.substr(0, replica.find(':')) == absl::StrCat(expert)) {
      InstancePlan copy{.expert_idx = expert, .is_new = true, .forward_rows_by_source = {}};
      LRMOE_CHECK(absl::SimpleAtoi(replica.substr(replica.find(':') + 1), &copy.rank_idx));
      copy.forward_rows_by_source.resize(num_ranks);
      plan.instances.push_back(copy);
    }
  }
  return plan;
}

}  // namespace

Story::Story() : core_(std::make_unique<core::Core>(options_)) {}

void Story::SetOptions(const Values& values) {
  options_.ranks = static_cast<int32_t>(Number(values, "ranks", options_.ranks));
  options_.max_ranks = static_cast<int32_t>(Number(values, "max_ranks", options_.max_ranks));
  options_.max_layers = static_cast<int32_t>(Number(values, "max_layers", options_.max_layers));
  options_.max_sessions = static_cast<int32_t>(Number(values, "max_sessions", options_.max_sessions));
  options_.max_queued_invocations =
      static_cast<int32_t>(Number(values, "max_queued", options_.max_queued_invocations));
  options_.max_plans_kept = static_cast<int32_t>(Number(values, "max_kept", options_.max_plans_kept));
  options_.reconnect_grace_us = 1000 * Number(values, "grace_ms", options_.reconnect_grace_us / 1000);
  options_.missing_after_us = 1000 * Number(values, "missing_ms", options_.missing_after_us / 1000);
  core_ = std::make_unique<core::Core>(options_);
}

std::string Story::Play(const std::string& line) {
  const Words words = absl::StrSplit(line, ' ', absl::SkipEmpty());
  Values values;
  for (const std::string& word : words)
    if (const size_t equals = word.find('='); equals != std::string::npos)
      values[word.substr(0, equals)] = word.substr(equals + 1);
  const std::string& command = words.at(0);
  if (command == "options") {
    SetOptions(values);
    return "";
  }
  if (command == "open") return Step(core::SessionOpened{Session(words.at(1))});
  if (command == "close") return Step(core::SessionClosed{Session(words.at(1)), Sentence(words, 2)});
  if (command == "invalid")
    return Step(core::SessionInvalid{Session(words.at(1)), absl::InvalidArgumentError(Sentence(words, 2))});
  if (command == "plan") return FinishPlan(words, values);
  if (command == "policy") return Step(core::SetPolicy{{values.begin(), values.end()}});
  if (command == "drain") return Step(core::DrainRequested{Sentence(words, 1)});
  if (command == "stop") return Step(core::Stop{Sentence(words, 1)});
  if (command == "status") return ShowStatus();
  if (command == "wait") {  // "wait 500": so many milliseconds, with the ticks that fall due
    int64_t milliseconds = 0;
    LRMOE_CHECK(absl::SimpleAtoi(words.at(1), &milliseconds));
    const int64_t until = now_us_ + 1000 * milliseconds;
    std::string out;
    while (core_->NextTick() <= until) {
      now_us_ = std::max(now_us_, core_->NextTick());
      absl::StrAppend(&out, Step(core::Tick{}));
    }
    now_us_ = until;
    return out;
  }
  if (command == "counts" || command == "hello" || command == "model" || command == "report" ||
      command == "heartbeat" || command == "leave")
    return Step(ParseMessage(words, values));
  return absl::StrCat("error: unknown command ", command, "\n");
}

core::Event Story::ParseMessage(const Words& words, const Values& values) const {
  core::SessionMessage event{Session(words.at(1)), Heartbeat{}};
  const std::string& command = words[0];
  if (command == "hello") {
    Hello hello;
    hello.rank_idx = static_cast<int32_t>(Number(values, "rank", 0));
    hello.world_size = static_cast<int32_t>(Number(values, "world", 2));
    hello.job = Text(values, "job", "a");
    hello.node = Text(values, "node", absl::StrCat("n", hello.rank_idx));
    hello.epoch = Epoch{static_cast<uint64_t>(Number(values, "epoch", 0))};
    hello.memory_budget_bytes = Number(values, "budget", 0);
    hello.replica_slots = static_cast<int32_t>(Number(values, "slots", 1));
    hello.recompute_activation = Number(values, "recompute", 0) != 0;
    hello.packs_fp32_weights = Number(values, "packs_fp32", 0) != 0;
    hello.optimizer_on_device = Number(values, "optimizer_on_device", 0) != 0;
    hello.rows_per_ms = static_cast<double>(Number(values, "rows_per_ms", 0));
    event.message = hello;
  } else if (command == "model") {
    ModelSpec model{.num_layers = static_cast<int32_t>(Number(values, "layers", 2))};
    model.shape = {.num_experts = static_cast<int32_t>(Number(values, "experts", 4)),
                   .top_k = 1,
                   .hidden_size = 8,
                   .intermediate_size = 8};
    event.message = model;
  } else if (command == "counts") {
    SourceCounts counts{InvocationOf(values), {}};
    for (absl::string_view word : absl::StrSplit(Text(values, "n", "1,1,1,1"), ',')) {
      LRMOE_CHECK(absl::SimpleAtoi(word, &counts.counts.emplace_back()));
    }
    event.message = std::move(counts);
  } else if (command == "report") {
    InvocationReport report;
    report.invocation = InvocationOf(values);
    report.peak_bytes = Number(values, "peak", 0);
    event.message = report;
  } else if (command == "leave") {
    const bool failed = words.size() > 2 && words[2] == "failed";
    event.message = Leaving{Sentence(words, failed ? 3 : 2), failed};
  } else {
    event.message = Heartbeat{Number(values, "step", 0)};
  }
  return event;
}

std::string Story::FinishPlan(const Words& words, const Values& values) {
  uint64_t ticket = 0;
  LRMOE_CHECK(absl::SimpleAtoi(words.at(1), &ticket));
  const auto job = jobs_.find(ticket);
  if (job == jobs_.end()) return "error: no such job\n";
  core::PlanFinished event{job->second.tag, OwnersPlan(job->second.problem, Text(values, "replica", "")),
                           7.0};
  if (words.size() > 2 && words[2] == "fails") event.plan = absl::ResourceExhaustedError(Sentence(words, 3));
  jobs_.erase(job);
  return Step(event);
}

std::string Story::Step(const core::Event& event) {
  std::string out;
  for (const core::Action& action : core_->Step(event, now_us_)) absl::StrAppend(&out, Show(action), "\n");
  return out;
}

std::string Story::Show(const core::Action& action) {
  if (const auto* send = std::get_if<core::Send>(&action)) {
    return absl::StrCat("send ",
                        absl::StrJoin(send->sessions, ",",
                                      [](std::string* out, core::SessionId session) {
                                        absl::StrAppend(out, static_cast<uint64_t>(session));
                                      }),
                        ": ", Show(*send->message));
  }
  if (const auto* close = std::get_if<core::CloseSession>(&action))
    return absl::StrCat("close ", static_cast<uint64_t>(close->session), ": ",
                        close->status.ok() ? "ok" : close->status.ToString());
  if (const auto* start = std::get_if<core::StartPlan>(&action)) {
    jobs_[start->tag.ticket] = *start;
    return ShowProblem(*start);
  }
  if (const auto* record = std::get_if<core::RecordPlan>(&action))
    return absl::StrCat("record ", Brief(record->plan->plan.invocation), ": ", record->routed_rows, " rows");
  if (const auto* failure = std::get_if<core::RecordFailure>(&action))
    return absl::StrCat("record ", Brief(failure->invocation), ": failed");
  if (const auto* report = std::get_if<core::RecordReport>(&action))
    return absl::StrCat("record ", Brief(report->report.invocation), ": report of rank ", report->rank_idx);
  if (const auto* outcome = std::get_if<core::PolicyOutcome>(&action)) {
    if (!outcome->change.ok()) return absl::StrCat("policy refused: ", outcome->change.status().ToString());
    return absl::StrCat("policy accepted from step ", outcome->change->from_step);
  }
  const auto& log = std::get<core::Log>(action);
  return absl::StrCat("log ",
                      log.severity == core::Severity::kInfo      ? "info"
                      : log.severity == core::Severity::kWarning ? "warning"
                                                                 : "error",
                      ": ", log.text);
}

std::string Story::Show(const ControllerMessage& message) const {
  if (const auto* welcome = std::get_if<Welcome>(&message))
    return absl::StrCat("welcome to epoch ", static_cast<uint64_t>(welcome->epoch));
  if (const auto* plan = std::get_if<ExecutionPlan>(&message))
    return absl::StrCat("plan of ", Brief(plan->plan.invocation));
  if (const auto* change = std::get_if<PolicyChange>(&message))
    return absl::StrCat("policy from step ", change->from_step);
  if (const auto* abort = std::get_if<Abort>(&message)) return absl::StrCat("abort: ", abort->reason);
  if (const auto* drain = std::get_if<Drain>(&message)) return absl::StrCat("drain: ", drain->reason);
  const auto& error = std::get<PlanError>(message);
  return absl::StrCat("no plan of ", Brief(error.invocation), ": ", error.status.ToString());
}

std::string Story::ShowProblem(const core::StartPlan& start) const {
  const planner::PlanningProblem& problem = start.problem;
  std::vector<std::string> counts, nodes, residents;
  for (int32_t source = 0; source < problem.counts.num_sources(); ++source) {
    counts.push_back(absl::StrJoin(problem.counts.source(source), ","));
    nodes.push_back(absl::StrCat(problem.cluster.ranks[source].node));
    residents.push_back(absl::StrJoin(problem.resident[source], ","));
  }
  std::string out =
      absl::StrCat("start plan ", start.tag.ticket, " of ", Brief(start.tag.invocation), " counts ",
                   absl::StrJoin(counts, " | "), " nodes ", absl::StrJoin(nodes, ","));
  if (absl::StrJoin(residents, "") != "")
    absl::StrAppend(&out, " resident ", absl::StrJoin(residents, " | "));
  if (problem.model.recompute_activation) absl::StrAppend(&out, " activations recomputed");
  if (problem.model.optimizer_on_device) absl::StrAppend(&out, " optimizer on device");
  if (problem.policy != options_.policy)
    absl::StrAppend(&out, " rates ", absl::StrJoin(problem.policy.rates, ","));
  return out;
}

std::string Story::ShowStatus() {
  std::string out = absl::StrCat("epoch ", static_cast<uint64_t>(core_->epoch()), " ",
                                 std::string(core::Name(core_->state())));
  if (!core_->reason().empty()) absl::StrAppend(&out, " (", core_->reason(), ")");
  const std::vector<int32_t> missing = core_->MissingRanks(now_us_);
  absl::StrAppend(&out, " step ", core_->current_step(), " missing ",
                  missing.empty() ? "none" : absl::StrJoin(missing, ","), "\n");
  for (size_t rank = 0; rank < core_->members().size(); ++rank)
    absl::StrAppend(&out, "rank ", rank, " ", std::string(core::Name(core_->members()[rank].state)), "\n");
  return out;
}

}  // namespace lrmoe::test
