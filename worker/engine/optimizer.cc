#include "worker/engine/optimizer.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace lrmoe::engine {
namespace {

// What the thread needs of one expert: the store itself belongs to the engine thread.
struct ExpertUpdate {
  OptimizerState state;
  const float* gradient;
  std::byte* weights;
};

struct LayerUpdate {
  int32_t layer;
  AdamWStep step;
  std::vector<ExpertUpdate> experts;
};

kernels::Type TypeOf(DataType type) {
  return type == DataType::kBf16 ? kernels::Type::kBf16 : kernels::Type::kFp32;
}

}  // namespace

struct OptimizerQueue::Impl {
  ExpertStore* store;  // engine thread only
  kernels::Type type;
  std::unique_ptr<kernels::Device> device;  // queue thread only
  std::vector<bool> pending;                // [num_layers], engine thread only: enqueued, not waited for

  std::mutex mutex;
  std::condition_variable queued, drained;
  // Guarded by mutex. At most one update per layer (Enqueue checks), so at most num_layers <= 1024 long; the
  // one in progress stays in front.
  std::deque<LayerUpdate> updates;
  bool stop = false;

  std::thread thread;

  void Serve();
};

void OptimizerQueue::Impl::Serve() {
  std::unique_lock lock(mutex);
  while (true) {
    queued.wait(lock, [this] { return stop || !updates.empty(); });
    if (updates.empty()) return;                  // stopped and drained
    const LayerUpdate& update = updates.front();  // a deque keeps references when others are pushed behind
    lock.unlock();
    for (const ExpertUpdate& expert : update.experts) {
      const OptimizerState& state = expert.state;
      device->AdamW(update.step, static_cast<int64_t>(state.master.size()), state.master.data(),
                    state.m.data(), state.v.data(), expert.gradient, type, expert.weights);
    }
    lock.lock();
    updates.pop_front();
    if (updates.empty()) drained.notify_all();
  }
}

OptimizerQueue::OptimizerQueue(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}

absl::StatusOr<std::unique_ptr<OptimizerQueue>> OptimizerQueue::Create(
    ExpertStore* store, std::unique_ptr<kernels::Device> device) {
  LRMOE_CHECK(store != nullptr);
  LRMOE_CHECK(device != nullptr);
  auto impl = std::make_unique<Impl>();
  impl->store = store;
  impl->type = TypeOf(store->model().shape.dtype);
  impl->device = std::move(device);
  impl->pending.resize(store->model().num_layers);
  try {
    impl->thread = std::thread([raw = impl.get()] { raw->Serve(); });
  } catch (const std::system_error& error) {
    return absl::ResourceExhaustedError(absl::StrCat("optimizer queue: no thread: ", error.what()));
  }
  return std::unique_ptr<OptimizerQueue>(new OptimizerQueue(std::move(impl)));
}

OptimizerQueue::~OptimizerQueue() {
  {
    std::lock_guard lock(impl_->mutex);
    impl_->stop = true;
  }
  impl_->queued.notify_one();
  impl_->thread.join();
}

void OptimizerQueue::Enqueue(int32_t layer, const AdamWStep& step) {
  LRMOE_CHECK_GE(layer, 0);
  LRMOE_CHECK_LT(layer, impl_->store->model().num_layers);
  LRMOE_CHECK(!impl_->pending[layer]);
  impl_->pending[layer] = true;
  LayerUpdate update{layer, step, {}};
  for (int32_t expert_idx : impl_->store->owned()) {
    const ExpertInstance* instance = impl_->store->Find(layer, expert_idx);
    update.experts.push_back({impl_->store->State(layer, expert_idx), instance->gradient, instance->weights});
  }
  {
    std::lock_guard lock(impl_->mutex);
    impl_->updates.push_back(std::move(update));
  }
  impl_->queued.notify_one();
}

absl::Status OptimizerQueue::Wait(Deadline deadline) {
  {
    std::unique_lock lock(impl_->mutex);
    if (!impl_->drained.wait_until(lock, deadline, [this] { return impl_->updates.empty(); }))
      return absl::DeadlineExceededError(absl::StrCat("optimizer update of layer ",
                                                      impl_->updates.front().layer, " not done in time; ",
                                                      impl_->updates.size(), " layers left"));
  }
  for (int32_t layer = 0; layer < impl_->store->model().num_layers; ++layer) {
    if (!impl_->pending[layer]) continue;
    impl_->pending[layer] = false;
    const auto version = static_cast<uint64_t>(impl_->store->version(layer));
    impl_->store->SetVersion(layer, ParameterVersion{version + 1});
  }
  return absl::OkStatus();
}

}  // namespace lrmoe::engine
