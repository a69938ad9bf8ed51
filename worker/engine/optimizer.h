// AdamW on a queue behind the rest of the backward pass (paper, Algorithm 1, line 22). One thread of its own.
#pragma once

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/deadline.h"
#include "kernels/kernels.h"
#include "worker/engine/expert_store.h"

namespace lrmoe::engine {

using AdamWStep = kernels::Device::AdamWStep;

class OptimizerQueue {
 public:
  // `device` computes in host memory and is used from the queue's thread only: give it one of its own. When
  // the store's weights and gradients lie elsewhere they cross in chunks through pinned memory, while the
  // host computes the chunk between. When its optimizer state does too, nothing crosses: the store's device
  // computes, and `device` is null. ResourceExhausted: no memory for chunks, no thread.
  static absl::StatusOr<std::unique_ptr<OptimizerQueue>> Create(ExpertStore* store,
                                                                std::unique_ptr<kernels::Device> device);
  ~OptimizerQueue();  // drains, then joins

  // Queues the update of all owned experts of a layer: master, moments and weights; then zeroes nothing.
  // Until Wait returns the caller must not touch weights or gradients of that layer's owned experts, nor use
  // the store's device unless it shares the host's memory.
  void Enqueue(int32_t layer, const AdamWStep& step);
  // Until the queue is empty; then the versions of the updated layers are one higher. DeadlineExceeded names
  // the layer; errors of the store's device.
  absl::Status Wait(Deadline deadline);

 private:
  struct Impl;
  explicit OptimizerQueue(std::unique_ptr<Impl> impl);
  std::unique_ptr<Impl> impl_;
};

}  // namespace lrmoe::engine
