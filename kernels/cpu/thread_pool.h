// Fork-join over numbered tasks for one device. Idle threads sleep (never spin): many ranks share few cores.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "absl/functional/function_ref.h"

namespace lrmoe::kernels::cpu {

class ThreadPool {
 public:
  // `num_threads` counts the calling thread; num_threads - 1 threads are started.
  explicit ThreadPool(int num_threads);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const { return static_cast<int>(threads_.size()) + 1; }

  // Runs work(task, thread) once for every task in [0, num_tasks), thread in [0, num_threads); returns when
  // all are done. Tasks are handed out in order to whichever thread is free, so a result must not depend on
  // `thread`. One caller at a time; not to be called from inside `work`.
  void Run(int64_t num_tasks, absl::FunctionRef<void(int64_t task, int thread)> work);

 private:
  struct Job {
    absl::FunctionRef<void(int64_t, int)> work;
    int64_t num_tasks;
    std::atomic<int64_t> next{0};
  };
  void Serve(int thread);
  static void Drain(Job& job, int thread);

  std::mutex mutex_;
  std::condition_variable wake_, idle_;
  Job* job_ = nullptr;       // guarded by mutex_; null when no job is open
  uint64_t generation_ = 0;  // guarded by mutex_; counts jobs
  int active_ = 0;           // guarded by mutex_; pool threads inside the job
  bool stop_ = false;        // guarded by mutex_
  std::vector<std::thread> threads_;
};

}  // namespace lrmoe::kernels::cpu
