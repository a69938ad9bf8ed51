#include "worker/rpc/engine_thread.h"

#include <utility>

#include "absl/strings/str_cat.h"

namespace lrmoe::worker {
namespace {

bool EndsEpoch(const absl::Status& status) {
  return absl::IsDeadlineExceeded(status) || absl::IsUnavailable(status);
}

}  // namespace

EngineThread::EngineThread(std::function<void(const absl::Status&)> on_dead)
    : on_dead_(std::move(on_dead)), thread_([this] { Run(); }) {}

EngineThread::~EngineThread() {
  Stop();
}

absl::Status EngineThread::Post(Job job) {
  {
    std::lock_guard lock(mutex_);
    if (stopping_) return absl::UnavailableError("the worker is ending");
    if (jobs_.size() >= kMaxQueuedJobs) {
      return absl::ResourceExhaustedError(
          absl::StrCat(jobs_.size(), " requests wait for the engine, allowed are ", kMaxQueuedJobs));
    }
    jobs_.push_back(std::move(job));
  }
  wake_.notify_one();
  return absl::OkStatus();
}

void EngineThread::EndEpoch(absl::string_view reason) {
  std::lock_guard lock(mutex_);
  if (ended_.ok()) ended_ = absl::UnavailableError(reason);
}

void EngineThread::Stop() {
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  wake_.notify_one();
  if (thread_.joinable()) thread_.join();
}

void EngineThread::Run() {
  EngineSlot slot;
  while (true) {
    Job job;
    absl::Status ended;
    {
      std::unique_lock lock(mutex_);
      // Without a deadline: Stop() is the only way out, and every owner calls it.
      wake_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
      ended = ended_;
    }
    const absl::Status death = RunJob(job, ended, slot);
    if (!death.ok()) on_dead_(death);
  }
}

// Returns the error that ended the epoch, when this job brought it about.
absl::Status EngineThread::RunJob(Job& job, const absl::Status& ended, EngineSlot& slot) {
  absl::Status status = ended.ok() ? job.run(slot) : ended;
  // Before the answer: its receiver may free memory that the call was the last to use.
  job.run = nullptr;
  slot.openings.CloseUnused();
  if (!ended.ok()) {
    job.done(ended);
    return absl::OkStatus();
  }
  if (EndsEpoch(status)) {
    absl::Status death = EndWith(status);
    job.done(status);
    return death;
  }
  job.done(status);
  if (slot.engine == nullptr) return absl::OkStatus();
  status = slot.engine->AfterAnswer();
  return status.ok() ? status : EndWith(status);
}

// Returns `status`, or OK when somebody else ended the epoch and the engine was torn out of its work: then
// `status` becomes the cause, which says more than the symptom.
absl::Status EngineThread::EndWith(absl::Status& status) {
  std::lock_guard lock(mutex_);
  if (ended_.ok()) {
    ended_ = absl::UnavailableError(status.message());
    return status;
  }
  status = ended_;
  return absl::OkStatus();
}

}  // namespace lrmoe::worker
