// Plans that were made, newest last, bounded in number and bytes: what the admin API shows. Pure; one thread.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/plan.h"
#include "common/report.h"

namespace lrmoe::core {

struct PlanRecord {
  uint64_t number = 0;  // 1, 2, ... in the order they were made
  Epoch epoch{0};
  std::shared_ptr<const ExecutionPlan> plan;  // of a failure only the invocation is set, and feasible = false
  std::string error;                          // not empty: no plan was made
  int64_t routed_rows = 0;
  int64_t planned_at_ms = 0;                    // Unix time
  std::map<int32_t, InvocationReport> reports;  // by rank
};

struct LayerSummary {
  std::shared_ptr<const ExecutionPlan> last;
  int64_t routed_rows = 0;    // of the last
  double mean_retention = 0;  // over the plans kept
};

class History {
 public:
  // At least the newest record is kept, whatever its size.
  History(int32_t max_plans, int64_t max_bytes);

  // `number` is given by the history.
  const PlanRecord& Add(PlanRecord record);
  // A record of an earlier run with its number, which is above those before it; there may be gaps. Numbers go
  // on after it. It does not count in the tally.
  void Restore(PlanRecord record);
  void RestoreTally(int64_t made, int64_t infeasible);
  // To the newest record of its invocation, which it returns; a rank's second report replaces its first.
  // Null: no such record.
  const PlanRecord* AddReport(int32_t rank_idx, const InvocationReport& report);

  // Null when not kept. The newest of this invocation; of any plan of the layer.
  const PlanRecord* Find(const Invocation& invocation) const;
  const PlanRecord* FindLatest(int32_t layer) const;

  struct Filter {
    int64_t from_step = 0;
    std::optional<int64_t> to_step;  // inclusive
    std::optional<int32_t> layer;
    bool infeasible_only = false;
    uint64_t before_number = UINT64_MAX;  // only older ones
    size_t limit = 100;
  };
  // Newest first. `more` tells whether an older one matches too.
  std::vector<const PlanRecord*> List(const Filter& filter, bool* more) const;

  // Layers with a plan that is kept.
  std::map<int32_t, LayerSummary> Layers() const;
  // Of the plans kept: what q (0..1) of them took at most. 0 when there are none.
  double PlanMicroseconds(double q) const;
  int64_t num_made() const { return num_made_; }              // plans, ever
  int64_t num_infeasible() const { return num_infeasible_; }  // failures, and plans that fit nowhere
  size_t num_kept() const { return records_.size(); }
  uint64_t oldest_number() const;  // of those kept; of the next one when there are none

 private:
  struct Entry {
    PlanRecord record;
    int64_t bytes = 0;
  };
  void Keep(PlanRecord record);
  Entry* At(uint64_t number);
  const Entry* At(uint64_t number) const;
  void Trim();

  const size_t max_plans_;
  const int64_t max_bytes_;
  std::deque<Entry> records_;  // by number
  std::map<Invocation, uint64_t> newest_;
  uint64_t next_number_ = 1;
  int64_t bytes_ = 0;
  int64_t num_made_ = 0, num_infeasible_ = 0;
};

}  // namespace lrmoe::core
