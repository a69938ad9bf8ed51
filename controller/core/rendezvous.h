// Counts of an invocation wait here until every rank's are in; answers stay for ranks that ask again.
//
// A rank's counts of one invocation are answered exactly once per session: by the plan, or by an error. An
// invocation that ended in an error may be tried again once a rank has had that error. Pure; one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "common/counts.h"
#include "common/session.h"
#include "controller/core/events.h"

namespace lrmoe::core {

class Rendezvous {
 public:
  // Of one epoch: `num_ranks` ranks, `num_experts` experts. Limits as in CoreOptions.
  struct Limits {
    int32_t max_queued = 1024;
    int32_t max_kept = 4096;
    int64_t max_bytes_kept = int64_t{512} << 20;
  };
  struct Key {
    uint64_t generation = 0;
    Invocation invocation;
    auto operator<=>(const Key&) const = default;
  };
  // An invocation whose counts are all in. The ticket tells it from a later attempt of the same key.
  struct Ready {
    Key key;
    uint64_t ticket = 0;
  };
  struct Answer {
    int32_t rank_idx = 0;
    std::shared_ptr<const ControllerMessage> message;  // ExecutionPlan or PlanError of the counts it answers
  };
  struct Outcome {
    std::vector<Answer> answers;
    std::optional<Ready> ready;                               // all counts are in: plan it
    std::vector<std::pair<Invocation, absl::Status>> failed;  // newly, for the record
  };
  struct Waiting {
    Invocation invocation;
    int64_t since_us = 0;          // first counts
    std::vector<int32_t> missing;  // ranks, ascending
  };

  Rendezvous(int32_t num_ranks, int32_t num_experts, int32_t num_layers, const Limits& limits);

  // Counts of a rank, received on `session`.
  Outcome Add(int32_t rank_idx, SessionId session, const SourceCounts& counts, int64_t now_us);
  // Whether what was ready still waits for its plan; it may have failed since. If so: its counts, and its
  // answer.
  bool Awaits(const Ready& ready) const;
  const RoutedCounts& counts(const Key& key) const { return pending_.at(key).counts; }
  Outcome Resolve(const Ready& ready, std::shared_ptr<const ControllerMessage> plan);
  Outcome Fail(const Ready& ready, const absl::Status& status);

  // Invocations with counts missing for `limit_us` or longer, in order; with `once`, each is given only once.
  std::vector<Waiting> Overdue(int64_t now_us, int64_t limit_us, bool once);
  // When the next invocation becomes overdue that was not yet given; INT64_MAX: none.
  int64_t NextOverdue(int64_t limit_us) const;
  // An invocation that waits for this rank's counts.
  std::optional<Invocation> WaitsFor(int32_t rank_idx) const;
  // Lowest step that is pending; `otherwise` when nothing is.
  int64_t OldestPendingStep(int64_t otherwise) const;
  size_t num_pending() const { return pending_.size(); }
  // Highest step that a rank is at, by its counts; -1: none has sent any.
  int64_t max_step() const;
  // How often the ranks went back to an earlier step: the most of any rank.
  uint64_t generation() const { return generation_; }

 private:
  struct Pending {
    RoutedCounts counts;
    std::vector<bool> in;            // [G]
    std::vector<SessionId> session;  // [G] the one the counts came on
    int32_t num_in = 0;
    int64_t since_us = 0;
    uint64_t ticket = 0;  // not 0: complete, being planned
    bool given_overdue = false;
  };
  // An error and who has had it, shared by the invocations that failed together.
  struct Failure {
    absl::Status status;
    std::vector<SessionId> answered;  // [G]; 0: not yet
  };
  struct Kept {
    std::shared_ptr<const ControllerMessage> plan;  // or
    std::shared_ptr<Failure> failure;
    int64_t bytes = 0;
    uint64_t sequence = 0;  // which entry of order_ is its own
  };
  struct Source {
    uint64_t generation = 0;
    int64_t step = -1;
    std::deque<Key> unanswered;  // in the order it sent them
  };

  Outcome AddToPending(int32_t rank_idx, SessionId session, const Key& key, const SourceCounts& counts,
                       int64_t now_us);
  std::optional<Outcome> AnswerFromKept(int32_t rank_idx, SessionId session, const Key& key,
                                        const SourceCounts& counts);
  std::optional<absl::Status> Disagreement() const;
  Outcome FailTogether(const std::vector<Key>& keys, const absl::Status& status);
  void Keep(const Key& key, Kept kept);
  void Forget(const Key& key);

  const int32_t num_ranks_, num_experts_, num_layers_;
  const Limits limits_;
  std::vector<Source> sources_;  // [G]
  std::map<Key, Pending> pending_;
  std::map<Key, Kept> kept_;
  std::deque<std::pair<uint64_t, Key>>
      order_;  // of kept_, oldest first; entries whose sequence is stale are skipped
  uint64_t next_sequence_ = 1;
  uint64_t next_ticket_ = 1;
  int64_t bytes_kept_ = 0;
  uint64_t generation_ = 0;
};

}  // namespace lrmoe::core
