// Core: counts in, plans out.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cluster.h"
#include "controller/core/core.h"
#include "controller/core/plan_content.h"
#include "controller/core/planning_input.h"

namespace lrmoe::core {

void Core::OnCounts(SessionId session, int32_t rank_idx, const SourceCounts& counts) {
  Member& member = members_[rank_idx];
  if (state_ != EpochState::kRunning || !member.model.has_value()) {
    OnViolation(session, rank_idx,
                absl::FailedPreconditionError(state_ != EpochState::kRunning ? "counts before its Welcome"
                                                                             : "counts before its model"));
    return;
  }
  member.sent_counts = true;
  member.current_step = counts.invocation.step;
  const uint64_t generation = rendezvous_->generation();
  Rendezvous::Outcome outcome = rendezvous_->Add(rank_idx, session, counts, now_us_);
  // Back before a policy change: what was announced holds from here on.
  if (rendezvous_->generation() != generation) policies_ = {{newest_policy(), 0}};
  Carry(std::move(outcome));
  AbortIfWaitingForLeft();
}

void Core::OnReport(int32_t rank_idx, const InvocationReport& report) {
  Member& member = members_[rank_idx];
  member.peak_bytes = std::max(member.peak_bytes, report.peak_bytes);
  actions_.push_back(RecordReport{rank_idx, report});
}

void Core::AbortIfWaitingForLeft() {
  if (!rendezvous_.has_value()) return;
  for (size_t rank = 0; rank < members_.size(); ++rank) {
    if (members_[rank].state != MemberState::kLeft) continue;
    if (const auto invocation = rendezvous_->WaitsFor(static_cast<int32_t>(rank))) {
      AbortEpoch(absl::StrCat(Describe(static_cast<int32_t>(rank)),
                              " has left, but other ranks wait for its counts of ", ToString(*invocation)));
      return;
    }
  }
}

void Core::Carry(Rendezvous::Outcome outcome) {
  std::shared_ptr<const ControllerMessage> message;
  std::vector<SessionId> sessions;
  const auto flush = [&] {
    if (!sessions.empty()) actions_.push_back(Send{std::exchange(sessions, {}), message});
  };
  for (const Rendezvous::Answer& answer : outcome.answers) {
    if (answer.message != message) flush();
    message = answer.message;
    const Member& member = members_[answer.rank_idx];
    if (member.session.has_value())
      sessions.push_back(*member.session);  // else it asks again when it is back
  }
  flush();
  for (auto& [invocation, status] : outcome.failed) {
    Say(Severity::kWarning, absl::StrCat("no plan for ", ToString(invocation), ": ", status.message()));
    actions_.push_back(RecordFailure{invocation, status});
  }
  if (outcome.ready.has_value()) ready_.push_back(*outcome.ready);
  StartReadyPlans();
}

void Core::StartReadyPlans() {
  for (auto next = ready_.begin(); next != ready_.end();) {
    const Rendezvous::Ready ready = *next;
    const Invocation& invocation = ready.key.invocation;
    if (!rendezvous_->Awaits(ready)) {
      next = ready_.erase(next);
      continue;
    }
    if (planning_.contains(invocation.layer)) {
      ++next;
      continue;
    }
    next = ready_.erase(next);
    const Policy& policy = PolicyOf(invocation.step);
    const auto num_ranks = static_cast<int32_t>(members_.size());
    std::vector<Hello> hellos;
    for (const Member& member : members_) hellos.push_back(member.hello);
    auto [resident, first] = resident_.try_emplace(invocation.layer);
    if (first) resident->second.resize(num_ranks);
    planner::PlanningProblem problem{.counts = rendezvous_->counts(ready.key),
                                     .cluster = ClusterOf(hellos, model_->num_layers),
                                     .owner = ContiguousOwners(model_->shape.num_experts, num_ranks),
                                     .resident = resident->second,
                                     .model = MemoryModelOf(model_->shape, policy, hellos.front()),
                                     .policy = policy};
    planning_[invocation.layer] = {ready, policy};
    actions_.push_back(StartPlan{{epoch_, ready.ticket, invocation}, std::move(problem)});
  }
}

void Core::On(const PlanFinished& event) {
  const auto found = planning_.find(event.tag.invocation.layer);
  if (state_ != EpochState::kRunning || event.tag.epoch != epoch_ || found == planning_.end() ||
      found->second.ready.ticket != event.tag.ticket)
    return;  // of an epoch that is over
  const PlanJob job = std::move(found->second);
  planning_.erase(found);
  if (!rendezvous_->Awaits(job.ready)) {  // it failed meanwhile
    StartReadyPlans();
    return;
  }
  const Invocation& invocation = event.tag.invocation;
  if (!event.plan.ok()) {
    Carry(rendezvous_->Fail(job.ready, event.plan.status()));
    return;
  }
  ExecutionPlan plan{*event.plan, job.policy.selection, job.policy.router_gradient, job.policy.seed,
                     job.policy.rescale};
  plan.plan.invocation = invocation;
  plan.plan.plan_us = event.plan_us;
  resident_[invocation.layer] = ReplicasOf(plan.plan);
  auto message = std::make_shared<const ControllerMessage>(std::move(plan));
  std::shared_ptr<const ExecutionPlan> sent(message, &std::get<ExecutionPlan>(*message));
  Carry(rendezvous_->Resolve(job.ready, std::move(message)));
  const int64_t routed_rows = RoutedRows(sent->plan);
  actions_.push_back(RecordPlan{std::move(sent), epoch_, routed_rows});
}

}  // namespace lrmoe::core
