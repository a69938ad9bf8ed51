#include "controller/store/store.h"

#include <sys/resource.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/logging.h"
#include "common/status_macros.h"
#include "controller/core/plan_content.h"

namespace lrmoe::store {
namespace {

// How long the first record of a batch waits for others: a controller that is killed loses this much. Waking
// the writer and committing cost as much as several plans, so that many share them.
constexpr auto kBatchEvery = std::chrono::milliseconds(100);

// After a controller that was killed: numbers of epochs that it may have begun and not yet written down. They
// are written at once; only a disk that hangs leaves time for more than one.
constexpr uint64_t kSkippedEpochs = 16;

}  // namespace

absl::StatusOr<std::unique_ptr<Store>> Store::Open(const StoreOptions& options, Policy* policy) {
  LRMOE_ASSIGN_OR_RETURN(StateDirectory directory, StateDirectory::Lock(options.directory));
  LRMOE_ASSIGN_OR_RETURN(PlanDatabase database, PlanDatabase::Open(options.directory));
  LRMOE_ASSIGN_OR_RETURN(const std::vector<SavedField> saved, database.ReadPolicy());
  const PolicyChoice choice = ChoosePolicy(*policy, saved);
  for (const std::string& remark : choice.remarks) LogWarning(remark);
  const Policy configured = std::exchange(*policy, choice.policy);
  return std::unique_ptr<Store>(
      new Store(options, configured, choice.policy, std::move(directory), std::move(database)));
}

Store::Store(const StoreOptions& options, Policy configured, Policy chosen, StateDirectory directory,
             PlanDatabase database)
    : options_(options),
      configured_(std::move(configured)),
      chosen_(std::move(chosen)),
      directory_(std::move(directory)),
      database_(std::move(database)) {}

Store::~Store() {
  {
    std::lock_guard lock(mutex_);
    closing_ = true;
  }
  changed_.notify_all();
  if (writer_.joinable()) writer_.join();
  database_.reset();  // if there was no writer
}

absl::StatusOr<Store::Restored> Store::Load(core::History* history) {
  LRMOE_CHECK(!writer_.joinable());
  LRMOE_ASSIGN_OR_RETURN(const bool cut_short, database_->CutShort());
  LRMOE_ASSIGN_OR_RETURN(core::EpochRecord epoch, database_->ReadEpoch());
  LRMOE_RETURN_IF_ERROR(database_->Load(history));
  LRMOE_RETURN_IF_ERROR(database_->Begin(configured_, chosen_));
  const Epoch next{static_cast<uint64_t>(epoch.epoch) + 1 + (cut_short ? kSkippedEpochs : 0)};
  LogInfo("state_dir \"", options_.directory, "\" has ", history->num_kept(), " plans and epoch ",
          static_cast<uint64_t>(epoch.epoch),
          cut_short ? "; the controller before this one did not end in order" : "");
  writer_ = std::thread([this] { Run(); });
  return Restored{std::move(epoch), next};
}

template <typename Add>
void Store::Enqueue(int64_t bytes, const Add& add) {
  std::string trouble;
  bool wake = false;
  {
    std::lock_guard lock(mutex_);
    if (closing_) return;
    if (waiting_ + 1 > options_.max_waiting || waiting_bytes_ + bytes > options_.max_waiting_bytes) {
      if (error_.empty())
        trouble = BeginTrouble(absl::StrCat("the disk is too slow: ", waiting_, " plans and reports, ",
                                            waiting_bytes_, " bytes, wait for it"));
      ++lost_;
    } else {
      wake = batch_.empty();  // else the writer is awake or woken already
      add(batch_);
      ++waiting_;
      waiting_bytes_ += bytes;
      batch_bytes_ += bytes;
    }
  }
  if (wake) changed_.notify_one();
  if (!trouble.empty()) LogError(trouble);
}

template <typename Set>
void Store::Replace(const Set& set) {
  {
    std::lock_guard lock(mutex_);
    if (closing_) return;
    set(batch_);
    at_once_ = true;
  }
  changed_.notify_one();
}

void Store::AddPlan(const core::PlanRecord& record, const core::History& history) {
  const auto bytes = static_cast<int64_t>(sizeof(record) + record.error.size());
  Enqueue(bytes + core::ApproximateBytes(record.plan->plan), [&](Batch& batch) {
    batch.plans.push_back(record);
    batch.made = history.num_made();
    batch.infeasible = history.num_infeasible();
    batch.oldest_number = history.oldest_number();
  });
}

void Store::AddReport(const core::PlanRecord& record, int32_t rank_idx, const InvocationReport& report,
                      const core::History& history) {
  Enqueue(sizeof(Batch::Report), [&](Batch& batch) {
    batch.reports.push_back({record.number, rank_idx, report});
    batch.oldest_number = history.oldest_number();
  });
}

void Store::SetPolicy(const Policy& policy) {
  Replace([&](Batch& batch) { batch.policy = policy; });
}

void Store::SetEpoch(core::EpochRecord epoch) {
  Replace([&](Batch& batch) { batch.epoch = std::move(epoch); });
}

StoreState Store::state() const {
  std::lock_guard lock(mutex_);
  return {options_.directory, waiting_, lost_, error_};
}

absl::Status Store::Close(Deadline deadline) {
  std::unique_lock lock(mutex_);
  closing_ = true;
  changed_.notify_all();
  if (!writer_.joinable()) return absl::OkStatus();
  if (!done_.wait_until(lock, deadline, [this] { return ended_; }))
    return absl::DeadlineExceededError(absl::StrCat("state_dir \"", options_.directory,
                                                    "\": the disk hangs; ", waiting_,
                                                    " plans and reports are not written"));
  lock.unlock();
  writer_.join();
  return absl::OkStatus();
}

void Store::Run() {
  // On a busy machine the loop, the planners and the job come first; that this fails harms nothing.
  (void)setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), 10);
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return closing_ || !batch_.empty(); });  // Close wakes it
    changed_.wait_for(lock, kBatchEvery, [this] { return closing_ || at_once_; });
    if (batch_.empty()) break;  // closing, and nothing is left
    Batch batch = std::exchange(batch_, {});
    const int64_t bytes = std::exchange(batch_bytes_, 0), lost_before = lost_;
    at_once_ = false;
    lock.unlock();
    const absl::StatusOr<int64_t> orphans = database_->Write(batch);
    Conclude(std::move(batch), bytes, lost_before, orphans);
    lock.lock();
  }
  lock.unlock();
  if (const absl::Status ended = database_->End(); !ended.ok())
    LogError("state_dir \"", options_.directory, "\" cannot be closed in order: ", ended.message());
  database_.reset();
  directory_.reset();
  lock.lock();
  ended_ = true;
  done_.notify_all();
}

// What follows from an attempt to write; the log is written without the lock.
void Store::Conclude(Batch batch, int64_t bytes, int64_t lost_before,
                     const absl::StatusOr<int64_t>& orphans) {
  std::string trouble, over;
  {
    std::lock_guard lock(mutex_);
    const int64_t records = batch.num_records();
    waiting_ -= records;
    waiting_bytes_ -= bytes;
    if (!orphans.ok()) {
      if (error_.empty()) trouble = BeginTrouble(orphans.status().message());
      lost_ += records;
      if (!closing_) {  // these are tried again, unless there are newer ones
        if (!batch_.policy.has_value()) batch_.policy = std::move(batch.policy);
        if (!batch_.epoch.has_value()) batch_.epoch = std::move(batch.epoch);
      }
    } else {
      if (!error_.empty() && lost_ == lost_before) {  // nothing was refused meanwhile
        over = absl::StrCat("state_dir \"", options_.directory, "\" can be written again; ",
                            lost_ - lost_before_trouble_, " plans and reports were lost");
        error_.clear();
      }
      lost_ += *orphans;  // reports of plans that were lost
    }
  }
  if (!trouble.empty()) LogError(trouble);
  if (!over.empty()) LogWarning(over);
}

// Needs the mutex. Returns what to say.
std::string Store::BeginTrouble(absl::string_view why) {
  error_ = std::string(why);
  lost_before_trouble_ = lost_;
  return absl::StrCat("state_dir \"", options_.directory, "\": plans are being lost, the job goes on: ", why);
}

}  // namespace lrmoe::store
