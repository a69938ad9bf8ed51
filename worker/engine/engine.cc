#include "worker/engine/engine.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/check.h"
#include "common/cluster.h"
#include "common/plan_counts.h"
#include "common/status_macros.h"
#include "worker/engine/checkpoint.h"
#include "worker/engine/engine_state.h"
#include "worker/engine/exchange.h"
#include "worker/engine/select.h"

namespace lrmoe::engine {
namespace {

absl::Status Validate(const EngineOptions& options, int32_t num_ranks) {
  LRMOE_RETURN_IF_ERROR(lrmoe::Validate(options.model));
  if (options.num_threads < 1 || options.num_threads > 256)
    return absl::InvalidArgumentError(
        absl::StrCat("num_threads is ", options.num_threads, "; allowed: 1..256"));
  if (options.max_open_contexts < 1 || options.max_open_contexts > 65536)
    return absl::InvalidArgumentError(
        absl::StrCat("max_open_contexts is ", options.max_open_contexts, "; allowed: 1..65536"));
  if (options.memory_budget_bytes < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("memory_budget_bytes is ", options.memory_budget_bytes, "; allowed: 1 and more"));
  if (options.least_piece_bytes < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("least_piece_bytes is ", options.least_piece_bytes, "; allowed: 1 and more"));
  if (!options.nodes.empty() && static_cast<int32_t>(options.nodes.size()) != num_ranks)
    return absl::InvalidArgumentError(
        absl::StrCat("nodes has ", options.nodes.size(), " entries for ", num_ranks, " ranks"));
  return absl::OkStatus();
}

std::string Describe(const EngineState& state) {
  const EngineOptions& options = state.options;
  const bool packed = state.store != nullptr && state.store->packed();
  const LayerShape& shape = options.model.shape;
  return absl::StrCat(
      options.model.num_layers, " layers, E ", shape.num_experts, ", k ", shape.top_k, ", H ",
      shape.hidden_size, ", F ", shape.intermediate_size, shape.gated ? ", gated " : ", plain ",
      Name(shape.activation), ", ", Name(shape.dtype), options.recompute_activation ? ", recompute" : "",
      packed ? ", packed weights" : "", options.optimizer_on_device ? ", optimizer on device" : "",
      options.overlap ? absl::StrCat(", overlap in pieces of ", options.least_piece_bytes) : "", ", nodes ",
      absl::StrJoin(options.nodes, " "));
}

// Tensors beyond the machine's memory cannot exist; addresses for that much cost nothing.
int64_t ArenaCapacity(const EngineOptions& options) {
  const int64_t physical = static_cast<int64_t>(sysconf(_SC_PHYS_PAGES)) * sysconf(_SC_PAGESIZE);
  return std::min(options.memory_budget_bytes, physical);
}

// The device is there.
MemoryModelOptions MemoryModelOf(const EngineState& state, bool exact) {
  MemoryModelOptions model = lrmoe::MemoryModelOf(state.shape());
  model.exact_router_gradient = exact;
  model.recompute_activation = state.options.recompute_activation;
  model.packs_weights = state.options.pack_weights && state.device->PacksWeights(state.type());
  model.optimizer_on_device = state.options.optimizer_on_device;
  return model;
}

absl::Status Prepare(EngineState& state, absl::StatusOr<std::unique_ptr<kernels::Device>> device) {
  LRMOE_RETURN_IF_ERROR(Validate(state.options, state.num_ranks()));
  const LayerShape& shape = state.shape();
  LRMOE_ASSIGN_OR_RETURN(state.device, std::move(device));
  if (state.device == nullptr) {
    LRMOE_ASSIGN_OR_RETURN(state.device, kernels::CreateCpuDevice(state.options.num_threads));
  }
  const bool on_device = state.options.optimizer_on_device;
  if (on_device && state.device->Holds(&state))
    return absl::InvalidArgumentError(
        "optimizer_on_device is true on a device whose memory is the host's; allowed: false");
  LRMOE_ASSIGN_OR_RETURN(
      state.store,
      ExpertStore::Create(
          state.options.model, ContiguousOwners(shape.num_experts, state.num_ranks()), state.rank(),
          state.device.get(),
          {.packed = NumWeightForms(MemoryModelOf(state, false)) == 2, .optimizer_on_device = on_device}));
  std::unique_ptr<kernels::Device> optimizer_device;
  if (!on_device) {
    LRMOE_ASSIGN_OR_RETURN(optimizer_device, kernels::CreateCpuDevice(state.options.num_threads));
  }
  LRMOE_ASSIGN_OR_RETURN(state.optimizer,
                         OptimizerQueue::Create(state.store.get(), std::move(optimizer_device)));
  LRMOE_ASSIGN_OR_RETURN(state.arena,
                         Arena::Create(ArenaCapacity(state.options), state.options.poison_buffers));
  if (!state.device->Holds(state.arena.get())) {
    LRMOE_ASSIGN_OR_RETURN(
        state.device_rows,
        Arena::CreateOn(state.device.get(),
                        std::min(state.options.memory_budget_bytes, state.device->memory_bytes()),
                        state.options.poison_buffers, state.arena.get()));
  }
  for (const bool exact : {false, true})
    state.memory[exact] = ComputeMemoryCoefficients(MemoryModelOf(state, exact));
  state.loaded.assign(state.options.model.num_layers, std::vector<bool>(state.store->owned().size(), false));
  state.peak_bytes = state.ExpertBytes();
  return absl::OkStatus();
}

}  // namespace

struct Engine::Impl : EngineState {
  using EngineState::EngineState;
};

int64_t EngineState::ExpertBytes() const {
  int64_t sum = 0;
  for (int32_t layer = 0; layer < options.model.num_layers; ++layer) sum += store->bytes(layer);
  return sum;
}

RankWork EngineState::WorkOf(const ExecutionPlan& execution, int64_t num_tokens) const {
  RankWork work;
  work.source_pairs = num_tokens * shape().top_k;
  work.owned_experts = static_cast<int64_t>(store->owned().size());
  const LayerPlan& plan = execution.plan;
  const std::vector<int64_t> routed = RoutedRowsByExpert(plan);
  const std::vector<bool> selective = SelectiveExperts(plan);
  for (int32_t e : store->owned()) {
    if (!selective[e]) continue;
    work.scored_pairs += routed[e];
    work.most_scored_pairs = std::max(work.most_scored_pairs, routed[e]);
  }
  for (const InstancePlan& instance : plan.instances) {
    work.exported_replicas += !instance.owner && store->owner()[instance.expert_idx] == rank();
    if (instance.rank_idx != rank()) continue;
    const int64_t quota = plan.quota[instance.expert_idx];
    work.replicas += !instance.owner;
    work.forward_rows += instance.forward_rows;
    work.kept_rows += instance.backward_rows;
    // Which pairs survive is unknown yet: the worst case, as in the planner.
    work.moved_rows += std::max<int64_t>(0, std::min(instance.forward_rows, quota) - instance.backward_rows);
    const int64_t elsewhere = routed[instance.expert_idx] - instance.forward_rows;
    work.received_rows +=
        std::max<int64_t>(0, instance.backward_rows - std::max<int64_t>(0, quota - elsewhere));
  }
  return work;
}

MemoryBytes EngineState::Predict(const ExecutionPlan& execution, int64_t num_tokens) const {
  return PredictMemory(memory[execution.router_gradient == RouterGradient::kExact],
                       WorkOf(execution, num_tokens));
}

void EngineState::DropUnusedReplicas(int32_t layer) {
  for (const ExpertTransfer& replica : replicas.DropUnused(layer, contexts.PlansOf(layer)))
    if (replica.to == rank()) store->DropReplica(layer, replica.expert_idx);
}

absl::StatusOr<const std::byte*> EngineState::OnDevice(std::span<const std::byte> host, Buffer& copy) const {
  if (host.empty() || device->Holds(host.data())) return host.data();
  LRMOE_ASSIGN_OR_RETURN(copy, rows().Take(static_cast<int64_t>(host.size()), "the caller's rows"));
  device->Upload(copy.data(), host.data(), copy.size());
  return copy.data();
}

absl::StatusOr<std::byte*> EngineState::ForDevice(std::span<std::byte> host, Buffer& copy) const {
  if (host.empty() || device->Holds(host.data())) return host.data();
  LRMOE_ASSIGN_OR_RETURN(copy, rows().Take(static_cast<int64_t>(host.size()), "rows for the caller"));
  return copy.data();
}

absl::Status EngineState::Fail(const absl::Status& status) {
  transport->Abort(absl::StrCat("rank ", rank(), ": ", std::string(status.message())));
  (void)device->Wait();
  return status;
}

absl::StatusOr<std::unique_ptr<Engine>> Engine::Create(
    const EngineOptions& options, transport::Transport* transport, PlanProvider* plans,
    absl::StatusOr<std::unique_ptr<kernels::Device>> device) {
  auto impl = std::make_unique<Impl>(options, transport, plans);
  const absl::Status status = Prepare(*impl, std::move(device));
  LRMOE_RETURN_IF_ERROR(impl->Agree({Operation::kCreate, {}, Describe(*impl), 0, status}).status());
  return std::unique_ptr<Engine>(new Engine(std::move(impl)));
}

Engine::Engine(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Engine::~Engine() = default;

absl::StatusOr<ForwardResult> Engine::Forward(const ForwardArgs& args) {
  return RunForward(*impl_, args);
}
absl::StatusOr<BackwardResult> Engine::Backward(const BackwardArgs& args) {
  return RunBackward(*impl_, args);
}

absl::Status Engine::Discard(const Invocation& invocation) {
  absl::Status status;
  if (impl_->contexts.Find(invocation) == nullptr)
    status = absl::NotFoundError(absl::StrCat("no forward of ", ToString(invocation), " is open"));
  LRMOE_RETURN_IF_ERROR(impl_->Agree({Operation::kDiscard, invocation, "", 0, status}).status());
  impl_->plans->Report(impl_->contexts.Take(invocation).report);
  impl_->DropUnusedReplicas(invocation.layer);
  return absl::OkStatus();
}

absl::Status Engine::LoadExpert(int32_t layer, int32_t expert_idx, DataType type,
                                std::span<const std::byte> w1, std::span<const std::byte> w2) {
  if (layer < 0 || layer >= impl_->options.model.num_layers)
    return absl::InvalidArgumentError(
        absl::StrCat("layer is ", layer, "; allowed: 0..", impl_->options.model.num_layers - 1));
  LRMOE_RETURN_IF_ERROR(impl_->store->Load(layer, expert_idx, type, w1, w2));
  const std::vector<int32_t>& owned = impl_->store->owned();
  impl_->loaded[layer][std::lower_bound(owned.begin(), owned.end(), expert_idx) - owned.begin()] = true;
  return absl::OkStatus();
}

absl::Status Engine::FinishLoad(int32_t layer) {
  absl::Status status;
  if (layer < 0 || layer >= impl_->options.model.num_layers) {
    status = absl::InvalidArgumentError(
        absl::StrCat("layer is ", layer, "; allowed: 0..", impl_->options.model.num_layers - 1));
  } else {
    const std::vector<bool>& loaded = impl_->loaded[layer];
    const auto missing = std::find(loaded.begin(), loaded.end(), false);
    if (missing != loaded.end())
      status = absl::FailedPreconditionError(absl::StrCat("expert ",
                                                          impl_->store->owned()[missing - loaded.begin()],
                                                          " of layer ", layer, " was never loaded"));
  }
  LRMOE_RETURN_IF_ERROR(
      impl_->Agree({Operation::kFinishLoad, {0, layer, 0}, absl::StrCat("layer ", layer), 0, status})
          .status());
  // Never a number that was used: replicas and open forwards of earlier weights must not pass for current.
  const auto version = static_cast<uint64_t>(impl_->store->version(layer));
  impl_->store->SetVersion(layer, ParameterVersion{version + 1});
  return absl::OkStatus();
}

absl::Status Engine::OptimizerStep(const AdamWStep& step) {
  absl::Status status;
  if (step.step < 1)
    status = absl::InvalidArgumentError(absl::StrCat("step is ", step.step, "; allowed: 1 and more"));
  const std::string arguments =
      absl::StrCat("step ", step.step, " lr ", step.lr, " betas ", step.beta1, " ", step.beta2, " eps ",
                   step.eps, " weight decay ", step.weight_decay, " gradient scale ", step.gradient_scale);
  LRMOE_RETURN_IF_ERROR(
      impl_->Agree({Operation::kOptimizerStep, {step.step, 0, 0}, arguments, 0, status}).status());
  for (int32_t layer = 0; layer < impl_->options.model.num_layers; ++layer)
    if (impl_->store->version(layer) != ParameterVersion{0}) impl_->optimizer->Enqueue(layer, step);
  if (status = impl_->optimizer->Wait(After(impl_->options.collective_timeout)); !status.ok())
    return impl_->Fail(status);
  impl_->store->SetOptimizerStep(step.step);
  return absl::OkStatus();
}

absl::Status Engine::RefreshReplicas() {
  // Every rank knows what every rank holds, so all come to the same transfers.
  bool agreed = false;
  for (int32_t layer = 0; layer < impl_->options.model.num_layers; ++layer) {
    const ParameterVersion version = impl_->store->version(layer);
    const std::vector<ExpertTransfer> transfers =
        impl_->replicas.Stale(layer, impl_->store->owner(), version);
    if (transfers.empty()) continue;
    const Invocation at{impl_->store->optimizer_step(), layer, 0};
    if (!agreed) LRMOE_RETURN_IF_ERROR(impl_->Agree({Operation::kRefreshReplicas, at, "", 0, {}}).status());
    agreed = true;
    PhaseClock clock = impl_->StartClock();
    Exchange exchange(impl_->transport, at, impl_->options.collective_timeout, &clock, impl_->device.get());
    const absl::Status brought =
        BringWeights(exchange, impl_->rows(), *impl_->store, layer, transfers, version);
    if (!brought.ok()) return impl_->Fail(brought);
    impl_->replicas.SetRefreshed(layer, version);
  }
  return absl::OkStatus();
}

absl::StatusOr<double> Engine::SquaredGradientNorm() {
  LRMOE_RETURN_IF_ERROR(impl_->Agree({Operation::kGradientNorm, {}, "", 0, absl::OkStatus()}).status());
  double sum = 0;
  for (int32_t layer = 0; layer < impl_->options.model.num_layers; ++layer)
    for (int32_t expert : impl_->store->owned()) {
      const ExpertInstance& instance = *impl_->store->Find(layer, expert);
      if (!instance.gradient_is_zero)
        sum += impl_->device->SquaredNorm(impl_->store->parameters(), instance.gradient);
    }
  const transport::Call call{"gradient norm", {}, After(impl_->options.collective_timeout)};
  LRMOE_RETURN_IF_ERROR(impl_->transport->AllReduce(call, std::span(&sum, 1), transport::Reduction::kSum));
  return sum;
}

absl::Status Engine::ZeroGradients() {
  LRMOE_RETURN_IF_ERROR(impl_->Agree({Operation::kZeroGradients, {}, "", 0, absl::OkStatus()}).status());
  for (int32_t layer = 0; layer < impl_->options.model.num_layers; ++layer)
    impl_->store->ZeroGradients(layer);
  return impl_->device->Wait();
}

absl::Status Engine::SaveCheckpoint(const std::string& directory, int64_t step) {
  const Invocation at{step, 0, 0};
  LRMOE_RETURN_IF_ERROR(
      impl_->Agree({Operation::kSaveCheckpoint, at, directory, 0, absl::OkStatus()}).status());
  absl::Status status = WriteShard(*impl_->store, directory, step, impl_->rank(), impl_->num_ranks());
  LRMOE_RETURN_IF_ERROR(impl_->Agree({Operation::kSaveCheckpoint, at, "shards written", 0, status}).status());
  status = impl_->rank() == 0 ? CommitCheckpoint(directory, step, impl_->num_ranks()) : absl::OkStatus();
  return impl_->Agree({Operation::kSaveCheckpoint, at, "committed", 0, status}).status();
}

absl::StatusOr<int64_t> Engine::LoadCheckpoint(const std::string& directory, int64_t step) {
  const Invocation at{step, 0, 0};
  LRMOE_RETURN_IF_ERROR(
      impl_->Agree({Operation::kLoadCheckpoint, at, directory, 0, absl::OkStatus()}).status());
  const absl::StatusOr<CheckpointReader> reader = CheckpointReader::Open(*impl_->store, directory, step);
  const std::string found = reader.ok() ? absl::StrCat("found step ", reader->step()) : "";
  LRMOE_RETURN_IF_ERROR(impl_->Agree({Operation::kLoadCheckpoint, at, found, 0, reader.status()}).status());
  // From here on the store changes, on all ranks.
  impl_->contexts.Clear();
  const absl::Status loaded = reader->Load(*impl_->store);
  impl_->replicas.Clear();
  const absl::Status agreed = impl_->Agree({Operation::kLoadCheckpoint, at, "loaded", 0, loaded}).status();
  if (!agreed.ok()) {
    // Some rank has only a part. Version 0 makes every forward say that weights are missing.
    for (int32_t layer = 0; layer < impl_->options.model.num_layers; ++layer)
      impl_->store->SetVersion(layer, ParameterVersion{0});
    return agreed;
  }
  for (auto& layer : impl_->loaded) layer.assign(layer.size(), true);
  return reader->step();
}

absl::Status Engine::Refuse(Operation operation, const Invocation& invocation, const absl::Status& reason) {
  LRMOE_CHECK(!reason.ok());
  return impl_->Agree({operation, invocation, "", 0, reason}).status();
}

absl::Status Engine::Finish() {
  return Agree(*impl_->transport, {Operation::kFinish, {}, "", 0, absl::OkStatus()},
               After(impl_->options.finish_timeout))
      .status();
}

kernels::Device& Engine::device() {
  return *impl_->device;
}
ExpertStore& Engine::store() {
  return *impl_->store;
}
int64_t Engine::open_contexts() const {
  return impl_->contexts.size();
}
int64_t Engine::arena_growths() const {
  return impl_->arena->growths() + (impl_->device_rows ? impl_->device_rows->growths() : 0);
}
int64_t Engine::peak_bytes() const {
  return impl_->peak_bytes;
}

}  // namespace lrmoe::engine
