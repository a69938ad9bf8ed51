// What emulated kernels are launched onto.
#pragma once

#include <functional>
#include <utility>
#include <vector>

namespace lrmoe::emulator {

// Work in the order it was given, done when the stream is drained and not before, as late as CUDA allows.
class StreamQueue {
 public:
  virtual ~StreamQueue() = default;
  virtual void Add(std::function<void()> work) { work_.push_back(std::move(work)); }
  void Drain() {
    for (std::function<void()>& work : std::exchange(work_, {})) work();
  }

 private:
  std::vector<std::function<void()>> work_;
};

}  // namespace lrmoe::emulator
