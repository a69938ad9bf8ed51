#include "worker/engine_adapter.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "kernels/kernels.h"

namespace lrmoe {
namespace {

class EngineAdapter final : public worker::EnginePort {
 public:
  explicit EngineAdapter(std::unique_ptr<engine::Engine> engine) : engine_(std::move(engine)) {}

  absl::StatusOr<engine::ForwardResult> Forward(const engine::ForwardArgs& args) override {
    return engine_->Forward(args);
  }
  absl::StatusOr<engine::BackwardResult> Backward(const engine::BackwardArgs& args) override {
    return engine_->Backward(args);
  }
  absl::Status Discard(const Invocation& invocation) override { return engine_->Discard(invocation); }
  absl::Status LoadExpert(int32_t layer, int32_t expert_idx, DataType type, std::span<const std::byte> w1,
                          std::span<const std::byte> w2) override {
    return engine_->LoadExpert(layer, expert_idx, type, w1, w2);
  }
  absl::Status FinishLoad(int32_t layer) override { return engine_->FinishLoad(layer); }
  absl::Status OptimizerStep(const engine::AdamWStep& step) override {
    absl::Status status = engine_->OptimizerStep(step);
    refresh_replicas_ = status.ok();
    return status;
  }
  absl::Status AfterAnswer() override {
    return std::exchange(refresh_replicas_, false) ? engine_->RefreshReplicas() : absl::OkStatus();
  }
  absl::StatusOr<double> SquaredGradientNorm() override { return engine_->SquaredGradientNorm(); }
  absl::Status ZeroGradients() override { return engine_->ZeroGradients(); }
  absl::Status SaveCheckpoint(const std::string& directory, int64_t step) override {
    return engine_->SaveCheckpoint(directory, step);
  }
  absl::StatusOr<int64_t> LoadCheckpoint(const std::string& directory, int64_t step) override {
    return engine_->LoadCheckpoint(directory, step);
  }
  absl::Status Refuse(engine::Operation operation, const Invocation& invocation,
                      const absl::Status& reason) override {
    return engine_->Refuse(operation, invocation, reason);
  }
  absl::Status Finish() override { return engine_->Finish(); }

  absl::Status ExportExpert(int32_t layer, int32_t expert_idx, worker::ExpertContent content,
                            std::span<float> w1, std::span<float> w2) override {
    engine::ExpertStore& store = engine_->store();
    const std::vector<int32_t>& owned = store.owned();
    if (!std::binary_search(owned.begin(), owned.end(), expert_idx)) {
      return absl::NotFoundError(
          absl::StrCat("expert ", expert_idx, " of layer ", layer, " is not owned by this rank"));
    }
    const float* source = nullptr;
    std::vector<float> copy;
    if (content == worker::ExpertContent::kGradient) {
      LRMOE_ASSIGN_OR_RETURN(const std::span<const float> gradient,
                             store.HostGradient(layer, expert_idx, copy));
      source = gradient.data();
    } else if (store.version(layer) == ParameterVersion{0}) {
      return absl::FailedPreconditionError(
          absl::StrCat("layer ", layer, " has no weights yet; load them first"));
    } else {
      LRMOE_ASSIGN_OR_RETURN(const std::span<const float> master,
                             store.HostState(layer, expert_idx, engine::StatePart::kMaster, copy));
      source = master.data();
    }
    LRMOE_CHECK_EQ(static_cast<int64_t>(w1.size()), store.w2_offset());
    LRMOE_CHECK_EQ(static_cast<int64_t>(w1.size() + w2.size()), store.parameters());
    std::copy_n(source, w1.size(), w1.begin());
    std::copy_n(source + store.w2_offset(), w2.size(), w2.begin());
    return absl::OkStatus();
  }
  ParameterVersion version(int32_t layer) override { return engine_->store().version(layer); }
  int64_t optimizer_step() override { return engine_->store().optimizer_step(); }
  const std::vector<int32_t>& owned() override { return engine_->store().owned(); }
  kernels::Interprocess* interprocess() override { return engine_->device().interprocess(); }

 private:
  const std::unique_ptr<engine::Engine> engine_;
  bool refresh_replicas_ = false;  // the update made them stale
};

}  // namespace

absl::StatusOr<std::unique_ptr<worker::EnginePort>> CreateEngine(
    const engine::EngineOptions& options, transport::Transport* transport, engine::PlanProvider* plans,
    absl::StatusOr<std::unique_ptr<kernels::Device>> device) {
  LRMOE_ASSIGN_OR_RETURN(auto engine, engine::Engine::Create(options, transport, plans, std::move(device)));
  return std::make_unique<EngineAdapter>(std::move(engine));
}

}  // namespace lrmoe
