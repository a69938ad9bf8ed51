#include "kernels/cpu/thread_pool.h"

namespace lrmoe::kernels::cpu {

ThreadPool::ThreadPool(int num_threads) {
  threads_.reserve(num_threads - 1);
  for (int thread = 1; thread < num_threads; ++thread)
    threads_.emplace_back([this, thread] { Serve(thread); });
}

ThreadPool::~ThreadPool() {
  {
    std::lock_guard lock(mutex_);
    stop_ = true;
  }
  wake_.notify_all();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Drain(Job& job, int thread) {
  for (int64_t task; (task = job.next.fetch_add(1, std::memory_order_relaxed)) < job.num_tasks;) {
    job.work(task, thread);
  }
}

void ThreadPool::Run(int64_t num_tasks, absl::FunctionRef<void(int64_t, int)> work) {
  Job job{work, num_tasks};
  if (threads_.empty() || num_tasks <= 1) return Drain(job, 0);
  {
    std::lock_guard lock(mutex_);
    job_ = &job;
    ++generation_;
  }
  wake_.notify_all();
  Drain(job, 0);
  // Closing the job first means a thread that is still waking up is not waited for.
  std::unique_lock lock(mutex_);
  job_ = nullptr;
  idle_.wait(lock, [this] { return active_ == 0; });
}

void ThreadPool::Serve(int thread) {
  uint64_t seen = 0;
  std::unique_lock lock(mutex_);
  while (true) {
    wake_.wait(lock, [&] { return stop_ || (job_ != nullptr && generation_ != seen); });
    if (stop_) return;
    seen = generation_;
    Job& job = *job_;
    ++active_;
    lock.unlock();
    Drain(job, thread);
    lock.lock();
    if (--active_ == 0) idle_.notify_one();
  }
}

}  // namespace lrmoe::kernels::cpu
