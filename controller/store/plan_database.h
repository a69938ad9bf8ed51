// The file: lrmoe.db in the state directory. Synchronous; one thread at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/policy.h"
#include "controller/core/core.h"
#include "controller/core/history.h"
#include "controller/store/policy_choice.h"
#include "controller/store/sqlite.h"

namespace lrmoe::store {

// What is written in one transaction.
struct Batch {
  struct Report {
    uint64_t number = 0;  // of its plan
    int32_t rank_idx = 0;
    InvocationReport report;
  };
  // Deques, because they grow under the eyes of the loop: never by moving all they hold.
  std::deque<core::PlanRecord> plans;  // their reports are not looked at
  std::deque<Report> reports;          // of plans written before or in this batch
  int64_t made = 0, infeasible = 0;    // the history's counts, with the last of `plans`
  uint64_t oldest_number = 0;          // older plans are deleted
  std::optional<Policy> policy;
  std::optional<core::EpochRecord> epoch;

  int64_t num_records() const { return static_cast<int64_t>(plans.size() + reports.size()); }
  bool empty() const { return num_records() == 0 && !policy.has_value() && !epoch.has_value(); }
};

class PlanDatabase {
 public:
  static constexpr const char* kFile = "lrmoe.db";
  static constexpr int32_t kSchema = 1;  // user_version

  // In `directory`, which this process has locked. Makes the file if there is none; changes nothing when what
  // is there is damaged, of another program or of a newer version, which are errors that name the file.
  static absl::StatusOr<PlanDatabase> Open(const std::string& directory);

  // DataLoss as above when what is read is not valid.
  absl::StatusOr<std::vector<SavedField>> ReadPolicy();
  absl::Status Load(core::History* history);
  absl::StatusOr<core::EpochRecord> ReadEpoch();
  // Whether the controller before this one did not get to End: what it did last may be missing.
  absl::StatusOr<bool> CutShort();

  // A controller starts: `configured` are the settings, `chosen` what is in force.
  absl::Status Begin(const Policy& configured, const Policy& chosen);
  // All of the batch or, with an error, nothing. Returns how many reports had no plan here.
  absl::StatusOr<int64_t> Write(const Batch& batch);
  // Everything is written.
  absl::Status End();

 private:
  PlanDatabase(std::string path, Database database)
      : path_(std::move(path)), database_(std::move(database)) {}
  static absl::Status Create(const std::string& directory);
  absl::Status Check();
  absl::Status PrepareAll();
  absl::StatusOr<int64_t> WriteAll(const Batch& batch);
  absl::Status WriteEpoch(const core::EpochRecord& epoch);
  absl::Status LoadAll(core::History* history);

  std::string path_;
  Database database_;
  std::optional<Statement> add_plan_, add_report_, drop_plans_, drop_reports_, set_counts_, set_policy_;
};

}  // namespace lrmoe::store
