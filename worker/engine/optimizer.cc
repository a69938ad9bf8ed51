#include "worker/engine/optimizer.h"

#include <algorithm>
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

// Parameters that cross at once. 4 MiB of gradient take several times as long as waiting for them does, and
// two chunks stay small beside one expert's state.
constexpr int64_t kChunkParameters = int64_t{1} << 20;

// Pinned host memory that a gradient comes into and weights leave from.
struct Chunk {
  std::unique_ptr<kernels::Memory> gradient, weights;
};

}  // namespace

struct OptimizerQueue::Impl {
  ExpertStore* store;  // engine thread only, but for what never changes and its device
  kernels::Type type;
  std::unique_ptr<kernels::Device> device;  // queue thread only; null: the store's
  std::vector<bool> pending;                // [num_layers], engine thread only: enqueued, not waited for

  std::mutex mutex;
  std::condition_variable queued, drained;
  // Guarded by mutex. At most one update per layer (Enqueue checks), so at most num_layers <= 1024 long; the
  // one in progress stays in front.
  std::deque<LayerUpdate> updates;
  bool stop = false;
  absl::Status failed;  // of the store's device; then updates are dropped

  // Queue thread only.
  std::vector<std::byte> weights;  // plain ones of an expert that is held packed
  Chunk chunks[2];                 // where gradients and weights cross

  std::thread thread;

  absl::Status AllocateChunks();
  void UpdateInPlace(const AdamWStep& step, const ExpertUpdate& expert);
  absl::Status UpdateOnDevice(const LayerUpdate& update);
  absl::Status UpdateAcross(const LayerUpdate& update);
  absl::Status Update(const LayerUpdate& update);
  void Serve();
};

absl::Status OptimizerQueue::Impl::AllocateChunks() {
  const int64_t n = std::min(kChunkParameters, store->parameters());
  for (Chunk& chunk : chunks) {
    LRMOE_ASSIGN_OR_RETURN(chunk.gradient,
                           store->device().AllocatePinned(n * static_cast<int64_t>(sizeof(float))));
    LRMOE_ASSIGN_OR_RETURN(chunk.weights, store->device().AllocatePinned(n * kernels::SizeOf(type)));
  }
  return absl::OkStatus();
}

void OptimizerQueue::Impl::UpdateInPlace(const AdamWStep& step, const ExpertUpdate& expert) {
  const OptimizerState& state = expert.state;
  const auto n = static_cast<int64_t>(state.master.size());
  std::byte* to = expert.instance.weights;
  if (store->packed()) {
    weights.resize(n * kernels::SizeOf(type));
    to = weights.data();
  }
  device->AdamW(step, n, state.master.data(), state.m.data(), state.v.data(), expert.instance.gradient, type,
                to);
  if (store->packed()) PackWeights(*device, store->model().shape, to, expert.instance);
}

absl::Status OptimizerQueue::Impl::UpdateOnDevice(const LayerUpdate& update) {
  for (const ExpertUpdate& expert : update.experts) {
    const OptimizerState& state = expert.state;
    store->device().AdamW(update.step, static_cast<int64_t>(state.master.size()), state.master.data(),
                          state.m.data(), state.v.data(), expert.instance.gradient, type,
                          expert.instance.weights);
  }
  return store->device().Wait();
}

// While the host computes one chunk, the next one's gradient comes in and the last one's weights go out.
absl::Status OptimizerQueue::Impl::UpdateAcross(const LayerUpdate& update) {
  kernels::Device& remote = store->device();
  const int64_t per_expert = (store->parameters() + kChunkParameters - 1) / kChunkParameters;
  const int64_t count = per_expert * static_cast<int64_t>(update.experts.size());
  struct Piece {
    const ExpertUpdate& expert;
    int64_t at, n;  // parameters
    Chunk& chunk;
  };
  const auto piece = [&](int64_t i) {
    const int64_t at = i % per_expert * kChunkParameters;
    return Piece{update.experts[i / per_expert], at, std::min(kChunkParameters, store->parameters() - at),
                 chunks[i % 2]};
  };
  const auto bring = [&](const Piece& p) {
    remote.Download(p.chunk.gradient->base(), p.expert.instance.gradient + p.at,
                    p.n * static_cast<int64_t>(sizeof(float)));
  };
  const auto send = [&](const Piece& p) {
    remote.Upload(p.expert.instance.weights + p.at * kernels::SizeOf(type), p.chunk.weights->base(),
                  p.n * kernels::SizeOf(type));
  };
  for (int64_t i = 0; i <= count; ++i) {
    if (i == 0 && count > 0) bring(piece(0));
    LRMOE_RETURN_IF_ERROR(remote.Wait());  // the gradient of i has come, the weights of i - 2 are gone
    if (i + 1 < count) bring(piece(i + 1));
    if (i > 0) send(piece(i - 1));
    if (i == count) break;
    const Piece p = piece(i);
    const OptimizerState& state = p.expert.state;
    device->AdamW(update.step, p.n, state.master.data() + p.at, state.m.data() + p.at, state.v.data() + p.at,
                  reinterpret_cast<const float*>(p.chunk.gradient->base()), type, p.chunk.weights->base());
  }
  return remote.Wait();
}

absl::Status OptimizerQueue::Impl::Update(const LayerUpdate& update) {
  if (store->optimizer_on_device()) return UpdateOnDevice(update);
  if (!store->in_host_memory()) return UpdateAcross(update);
  for (const ExpertUpdate& expert : update.experts) UpdateInPlace(update.step, expert);
  return absl::OkStatus();
}

void OptimizerQueue::Impl::Serve() {
  std::unique_lock lock(mutex);
  while (true) {
    queued.wait(lock, [this] { return stop || !updates.empty(); });
    if (updates.empty()) return;                  // stopped and drained
    const LayerUpdate& update = updates.front();  // a deque keeps references when others are pushed behind
    const absl::Status before = failed;
    lock.unlock();
    const absl::Status status = before.ok() ? Update(update) : before;
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
  LRMOE_CHECK(store->optimizer_on_device() == (device == nullptr));
  auto impl = std::make_unique<Impl>();
  impl->store = store;
  impl->type = TypeOf(store->model().shape.dtype);
  impl->device = std::move(device);
  impl->pending.resize(store->model().num_layers);
  if (!store->in_host_memory() && !store->optimizer_on_device())
    LRMOE_RETURN_IF_ERROR(impl->AllocateChunks());
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
    impl_->store->Gradient(layer, expert_idx);  // zeros where they count
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
