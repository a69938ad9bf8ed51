// What the controller keeps on disk. Whoever adds to it never waits for the disk: a thread writes what lies
// in a bounded queue, in batches. What does not fit or cannot be written is counted, said in the log once,
// and lost.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/deadline.h"
#include "controller/core/core.h"
#include "controller/core/history.h"
#include "controller/store/plan_database.h"
#include "controller/store/state_directory.h"

namespace lrmoe::store {

struct StoreOptions {
  std::string directory;
  // Not yet written. A step of 64 layers on 1024 ranks has 64 plans and 65536 reports: the queue takes one
  // while another is written. In bytes it is an eighth of what the history may have by default.
  int64_t max_waiting = int64_t{1} << 18;
  int64_t max_waiting_bytes = int64_t{64} << 20;
};

// For `lrmoectl status`.
struct StoreState {
  std::string directory;
  int64_t waiting = 0;  // plans and reports not yet written
  int64_t lost = 0;     // plans and reports that were not and will not be written, since Open
  std::string error;    // why they are being lost; empty: they are not
};

class Store {
 public:
  // Locks the directory, made if missing, opens or makes the database, and settles the policy: `policy` are
  // the settings, and becomes what is in force. Errors name the directory or file and say what to do; a file
  // that was there is as before then.
  static absl::StatusOr<std::unique_ptr<Store>> Open(const StoreOptions& options, Policy* policy);
  ~Store();  // waits for what Close left, however long it takes
  Store(const Store&) = delete;
  Store& operator=(const Store&) = delete;

  // What earlier controllers left.
  struct Restored {
    core::EpochRecord epoch;  // the last one
    Epoch next_epoch{1};      // no epoch has had it
  };
  // Once, before anything is added: puts the plans into `history`, which keeps what its limits allow. From
  // then on the database counts as in use, and the policy is written down. Errors as of Open.
  absl::StatusOr<Restored> Load(core::History* history);

  // ---- any thread; none of these waits for the disk. After Close nothing is taken.
  // `history` holds the record since it was added; what it has dropped is deleted on disk as well.
  void AddPlan(const core::PlanRecord& record, const core::History& history);
  // Of `rank_idx`, belonging to `record`.
  void AddReport(const core::PlanRecord& record, int32_t rank_idx, const InvocationReport& report,
                 const core::History& history);
  void SetPolicy(const Policy& policy);
  void SetEpoch(core::EpochRecord epoch);
  StoreState state() const;

  // Writes what waits, marks the end as an orderly one, and frees the directory. DeadlineExceeded, saying how
  // much is not written, when the disk does not get it done by then.
  absl::Status Close(Deadline deadline);

 private:
  Store(const StoreOptions& options, Policy configured, Policy chosen, StateDirectory directory,
        PlanDatabase database);
  // Calls `add` on the next batch, unless a limit says no.
  template <typename Add>
  void Enqueue(int64_t bytes, const Add& add);
  // Calls `set` on the next batch, which is then written at once: of these only the newest counts, so that
  // they need no room.
  template <typename Set>
  void Replace(const Set& set);
  void Run();
  void Conclude(Batch batch, int64_t bytes, int64_t lost_before, const absl::StatusOr<int64_t>& orphans);
  std::string BeginTrouble(absl::string_view why);

  const StoreOptions options_;
  const Policy configured_, chosen_;

  mutable std::mutex mutex_;
  std::condition_variable changed_;  // for the writer
  std::condition_variable done_;     // for Close
  Batch batch_;                      // to be written next
  int64_t batch_bytes_ = 0;
  int64_t waiting_ = 0, waiting_bytes_ = 0;  // in it, and in the one that is being written
  int64_t lost_ = 0;
  int64_t lost_before_trouble_ = 0;
  std::string error_;  // of the present trouble
  bool at_once_ = false;
  bool closing_ = false;
  bool ended_ = false;

  // The writer's own while it runs. The lock is freed after the file is closed.
  std::optional<StateDirectory> directory_;
  std::optional<PlanDatabase> database_;
  std::thread writer_;
};

}  // namespace lrmoe::store
