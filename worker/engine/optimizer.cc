#include "worker/engine/optimizer.h"

#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

// What the thread needs of one expert: the store itself belongs to the engine thread.
struct ExpertUpdate {
  OptimizerState state;
  ExpertInstance instance;
};

struct LayerUpdate {
  int32_t layer;
  AdamWStep step;
  std::vector<ExpertUpdate> experts;
};

}  // namespace

struct OptimizerQueue::Impl {
  ExpertStore* store;  // engine thread only, but for what never changes and its device
  kernels::Type type;
  std::unique_ptr<kernels::Device> device;  // queue thread only
  std::vector<bool> pending;                // [num_layers], engine thread only: enqueued, not waited for

  std::mutex mutex;
  std::condition_variable queued, drained;
  // Guarded by mutex. At most one update per layer (Enqueue checks), so at most num_layers <= 1024 long; the
  // one in progress stays in front.
  std::deque<LayerUpdate> updates;
  bool stop = false;
  absl::Status failed;  // of the store's device; then updates are dropped

  // Queue thread only: one expert's gradient and plain weights on their way from and to the store.
  std::vector<float> gradient;
  std::vector<std::byte> weights;

  std::thread thread;

  absl::Status Update(const AdamWStep& step, const ExpertUpdate& expert);
  void Serve();
};

absl::Status OptimizerQueue::Impl::Update(const AdamWStep& step, const ExpertUpdate& expert) {
  const OptimizerState& state = expert.state;
  const auto n = static_cast<int64_t>(state.master.size());
  const float* from = expert.instance.gradient;
  std::byte* to = expert.instance.weights;
  const bool staged = !store->in_host_memory();
  if (staged || store->packed()) {
    weights.resize(n * kernels::SizeOf(type));
    to = weights.data();
  }
  if (staged) {
    gradient.resize(n);
    store->device().Download(gradient.data(), from, n * static_cast<int64_t>(sizeof(float)));
    LRMOE_RETURN_IF_ERROR(store->device().Wait());
    from = gradient.data();
  }
  device->AdamW(step, n, state.master.data(), state.m.data(), state.v.data(), from, type, to);
  if (store->packed()) PackWeights(*device, store->model().shape, to, expert.instance);
  if (!staged) return absl::OkStatus();
  store->device().Upload(expert.instance.weights, to, n * kernels::SizeOf(type));
  return store->device().Wait();
}

void OptimizerQueue::Impl::Serve() {
  std::unique_lock lock(mutex);
  while (true) {
    queued.wait(lock, [this] { return stop || !updates.empty(); });
    if (updates.empty()) return;                  // stopped and drained
    const LayerUpdate& update = updates.front();  // a deque keeps references when others are pushed behind
    lock.unlock();
    absl::Status status;
    for (const ExpertUpdate& expert : update.experts)
      if (status.ok()) status = Update(update.step, expert);
    lock.lock();
    if (failed.ok()) failed = status;
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
    update.experts.push_back({impl_->store->State(layer, expert_idx), *instance});
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
    LRMOE_RETURN_IF_ERROR(impl_->failed);
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
