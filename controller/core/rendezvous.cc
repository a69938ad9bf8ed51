#include "controller/core/rendezvous.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "controller/core/plan_content.h"

namespace lrmoe::core {
namespace {

std::shared_ptr<const ControllerMessage> ErrorMessage(const Invocation& invocation,
                                                      const absl::Status& status) {
  return std::make_shared<const ControllerMessage>(PlanError{invocation, status});
}

absl::Status TwoContents(int32_t rank_idx, const Invocation& invocation,
                         const ContentDifference& difference) {
  return absl::InvalidArgumentError(absl::StrCat("rank ", rank_idx, " sent two different counts for ",
                                                 ToString(invocation), ": expert ", difference.expert_idx,
                                                 " has ", difference.first, " in the first and ",
                                                 difference.second, " in the second"));
}

}  // namespace

Rendezvous::Rendezvous(int32_t num_ranks, int32_t num_experts, int32_t num_layers, const Limits& limits)
    : num_ranks_(num_ranks),
      num_experts_(num_experts),
      num_layers_(num_layers),
      limits_(limits),
      sources_(num_ranks) {}

Rendezvous::Outcome Rendezvous::Add(int32_t rank_idx, SessionId session, const SourceCounts& counts,
                                    int64_t now_us) {
  LRMOE_CHECK(rank_idx >= 0 && rank_idx < num_ranks_);
  Source& source = sources_[rank_idx];
  const int64_t step = counts.invocation.step;
  const auto waiting = pending_.find({source.generation, counts.invocation});
  const bool sent_again = waiting != pending_.end() && waiting->second.in[rank_idx];
  if (step < source.step && !sent_again) {
    ++source.generation;  // the rank went back: everything from here on is new
    generation_ = std::max(generation_, source.generation);
    source.step = step;
  }
  source.step = std::max(source.step, step);

  const Key key{source.generation, counts.invocation};
  if (std::optional<Outcome> outcome = AnswerFromKept(rank_idx, session, key, counts))
    return *std::move(outcome);
  return AddToPending(rank_idx, session, key, counts, now_us);
}

std::optional<Rendezvous::Outcome> Rendezvous::AnswerFromKept(int32_t rank_idx, SessionId session,
                                                              const Key& key, const SourceCounts& counts) {
  const auto found = kept_.find(key);
  if (found == kept_.end()) return std::nullopt;
  Kept& kept = found->second;
  if (kept.failure != nullptr) {
    SessionId& answered = kept.failure->answered[rank_idx];
    if (answered == session) {  // it has had the error here and tries again
      Forget(key);
      return std::nullopt;
    }
    answered = session;
    return Outcome{.answers = {{rank_idx, ErrorMessage(key.invocation, kept.failure->status)}}};
  }
  const LayerPlan& plan = std::get<ExecutionPlan>(*kept.plan).plan;
  if (const auto difference = FindDifference(plan, rank_idx, counts.counts)) {
    const absl::Status status = TwoContents(rank_idx, key.invocation, *difference);
    return Outcome{.answers = {{rank_idx, ErrorMessage(key.invocation, status)}},
                   .failed = {{key.invocation, status}}};
  }
  return Outcome{.answers = {{rank_idx, kept.plan}}};
}

Rendezvous::Outcome Rendezvous::AddToPending(int32_t rank_idx, SessionId session, const Key& key,
                                             const SourceCounts& counts, int64_t now_us) {
  const bool full = !pending_.contains(key) && pending_.size() >= static_cast<size_t>(limits_.max_queued);
  Pending& pending = pending_[key];
  if (pending.in.empty()) {
    pending.counts = RoutedCounts(num_ranks_, num_experts_);
    pending.in.resize(num_ranks_);
    pending.session.resize(num_ranks_);
    pending.since_us = now_us;
  }
  pending.session[rank_idx] = session;
  const bool right_size = counts.counts.size() == static_cast<size_t>(num_experts_);
  if (pending.in[rank_idx]) {
    const auto difference = FindDifference(pending.counts.source(rank_idx), counts.counts);
    if (!difference.has_value()) return {};
    // Its plan is on the way for the first content: the rank must not run it with the second.
    return FailTogether({key}, TwoContents(rank_idx, key.invocation, *difference));
  }
  pending.in[rank_idx] = true;
  ++pending.num_in;
  sources_[rank_idx].unanswered.push_back(key);
  if (full)
    return FailTogether({key}, absl::ResourceExhaustedError(absl::StrCat(
                                   "queued invocations are ", limits_.max_queued + 1, " with ",
                                   ToString(key.invocation), "; allowed: 0..", limits_.max_queued)));
  if (key.invocation.layer >= num_layers_)
    return FailTogether(
        {key}, absl::InvalidArgumentError(absl::StrCat("layer is ", key.invocation.layer, " on rank ",
                                                       rank_idx, "; allowed: 0..", num_layers_ - 1)));
  if (!right_size)
    return FailTogether({key}, absl::InvalidArgumentError(absl::StrCat(
                                   "rank ", rank_idx, " sent ", counts.counts.size(), " counts for ",
                                   ToString(key.invocation), "; the model has ", num_experts_, " experts")));
  std::copy(counts.counts.begin(), counts.counts.end(), pending.counts.source(rank_idx).begin());
  if (pending.num_in == num_ranks_) {
    pending.ticket = next_ticket_++;
    return Outcome{.ready = Ready{key, pending.ticket}};
  }
  if (const std::optional<absl::Status> disagreement = Disagreement()) {
    std::vector<Key> keys;
    for (const auto& [other, value] : pending_)
      if (value.ticket == 0) keys.push_back(other);
    return FailTogether(keys, *disagreement);
  }
  return {};
}

// Ranks ask in one common order, so whoever waits, waits for the same invocation first.
std::optional<absl::Status> Rendezvous::Disagreement() const {
  std::map<Key, std::vector<int32_t>> first;
  for (int32_t rank = 0; rank < num_ranks_; ++rank)
    if (!sources_[rank].unanswered.empty()) first[sources_[rank].unanswered.front()].push_back(rank);
  if (first.size() < 2) return std::nullopt;
  std::vector<std::string> sides;
  for (const auto& [key, ranks] : first) {
    std::string side = absl::StrCat("rank", ranks.size() > 1 ? "s " : " ", absl::StrJoin(ranks, ", "),
                                    " for ", ToString(key.invocation));
    if (key.generation > 0)
      absl::StrAppend(&side, " (having gone back to an earlier step ", key.generation, " x)");
    sides.push_back(std::move(side));
  }
  return absl::FailedPreconditionError(
      absl::StrCat("ranks wait for different invocations: ", absl::StrJoin(sides, "; ")));
}

bool Rendezvous::Awaits(const Ready& ready) const {
  const auto found = pending_.find(ready.key);
  return found != pending_.end() && found->second.ticket == ready.ticket;
}

Rendezvous::Outcome Rendezvous::Resolve(const Ready& ready, std::shared_ptr<const ControllerMessage> plan) {
  LRMOE_CHECK(Awaits(ready));
  Outcome outcome;
  for (int32_t rank = 0; rank < num_ranks_; ++rank) {
    outcome.answers.push_back({rank, plan});
    std::erase(sources_[rank].unanswered, ready.key);
  }
  pending_.erase(ready.key);
  const int64_t bytes = ApproximateBytes(std::get<ExecutionPlan>(*plan).plan);
  Keep(ready.key, {.plan = std::move(plan), .bytes = bytes});
  return outcome;
}

Rendezvous::Outcome Rendezvous::Fail(const Ready& ready, const absl::Status& status) {
  LRMOE_CHECK(Awaits(ready));
  return FailTogether({ready.key}, status);
}

Rendezvous::Outcome Rendezvous::FailTogether(const std::vector<Key>& keys, const absl::Status& status) {
  Outcome outcome;
  auto failure = std::make_shared<Failure>(Failure{status, std::vector<SessionId>(num_ranks_)});
  for (const Key& key : keys) {
    const Pending& pending = pending_.at(key);
    const auto message = ErrorMessage(key.invocation, status);
    for (int32_t rank = 0; rank < num_ranks_; ++rank) {
      if (!pending.in[rank]) continue;
      outcome.answers.push_back({rank, message});
      failure->answered[rank] = pending.session[rank];
      std::erase(sources_[rank].unanswered, key);
    }
    pending_.erase(key);
    outcome.failed.emplace_back(key.invocation, status);
    Keep(key, {.failure = failure, .bytes = static_cast<int64_t>(status.message().size()) + 8 * num_ranks_});
  }
  return outcome;
}

void Rendezvous::Keep(const Key& key, Kept kept) {
  Forget(key);
  kept.sequence = next_sequence_++;
  bytes_kept_ += kept.bytes;
  order_.emplace_back(kept.sequence, key);
  kept_[key] = std::move(kept);
  while (kept_.size() > static_cast<size_t>(limits_.max_kept) ||
         (bytes_kept_ > limits_.max_bytes_kept && kept_.size() > 1)) {
    const auto [sequence, oldest] = order_.front();
    order_.pop_front();
    const auto found = kept_.find(oldest);
    if (found == kept_.end() || found->second.sequence != sequence) continue;  // tried again since
    Forget(oldest);
  }
}

void Rendezvous::Forget(const Key& key) {
  const auto found = kept_.find(key);
  if (found == kept_.end()) return;
  bytes_kept_ -= found->second.bytes;
  kept_.erase(found);
  // Entries of forgotten keys stay in order_; drop those at its head so that it stays as short as kept_ is.
  const auto stale = [this](const std::pair<uint64_t, Key>& entry) {
    const auto kept = kept_.find(entry.second);
    return kept == kept_.end() || kept->second.sequence != entry.first;
  };
  while (!order_.empty() && stale(order_.front())) order_.pop_front();
}

std::vector<Rendezvous::Waiting> Rendezvous::Overdue(int64_t now_us, int64_t limit_us, bool once) {
  std::vector<Waiting> result;
  for (auto& [key, pending] : pending_) {
    if (pending.ticket != 0 || now_us - pending.since_us < limit_us || (once && pending.given_overdue))
      continue;
    if (once) pending.given_overdue = true;
    Waiting waiting{key.invocation, pending.since_us, {}};
    for (int32_t rank = 0; rank < num_ranks_; ++rank)
      if (!pending.in[rank]) waiting.missing.push_back(rank);
    result.push_back(std::move(waiting));
  }
  return result;
}

int64_t Rendezvous::NextOverdue(int64_t limit_us) const {
  int64_t next = std::numeric_limits<int64_t>::max();
  for (const auto& [key, pending] : pending_)
    if (pending.ticket == 0 && !pending.given_overdue) next = std::min(next, pending.since_us + limit_us);
  return next;
}

std::optional<Invocation> Rendezvous::WaitsFor(int32_t rank_idx) const {
  for (const auto& [key, pending] : pending_)
    if (!pending.in[rank_idx]) return key.invocation;
  return std::nullopt;
}

int64_t Rendezvous::max_step() const {
  int64_t step = -1;
  for (const Source& source : sources_) step = std::max(step, source.step);
  return step;
}

int64_t Rendezvous::OldestPendingStep(int64_t otherwise) const {
  return pending_.empty() ? otherwise : pending_.begin()->first.invocation.step;
}

}  // namespace lrmoe::core
