// The compact backward pass: score, select, route, exchange only kept rows, four grouped GEMMs on the real
// row counts, return (paper, Algorithm 1, lines 15-22; design "Backward").
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "worker/engine/compact.h"
#include "worker/engine/engine_state.h"
#include "worker/engine/route_backward.h"
#include "worker/engine/score.h"
#include "worker/engine/select.h"

namespace lrmoe::engine {
namespace {

absl::Status CheckArgs(EngineState& state, const BackwardArgs& args) {
  const ForwardContext* context = state.contexts.Find(args.invocation);
  if (context == nullptr)
    return absl::NotFoundError(absl::StrCat("no forward of ", ToString(args.invocation), " is open"));
  const int64_t pairs = context->num_tokens * state.shape().top_k;
  LRMOE_RETURN_IF_ERROR(CheckSize("dy (bytes)", args.dy.size(), context->num_tokens * state.row_bytes()));
  LRMOE_RETURN_IF_ERROR(CheckSize("dx (bytes)", args.dx.size(), context->num_tokens * state.row_bytes()));
  LRMOE_RETURN_IF_ERROR(CheckSize("dalpha (elements)", args.dalpha.size(), pairs));
  if (!args.kept.empty()) LRMOE_RETURN_IF_ERROR(CheckSize("kept (elements)", args.kept.size(), pairs));
  const ParameterVersion now = state.store->version(args.invocation.layer);
  if (now != context->version)
    return absl::FailedPreconditionError(
        absl::StrCat("the forward of ", ToString(args.invocation), " used parameter version ",
                     static_cast<uint64_t>(context->version), ", the layer now has version ",
                     static_cast<uint64_t>(now), ": the backward must come before the update"));
  return absl::OkStatus();
}

class BackwardPass {
 public:
  BackwardPass(EngineState& state, const BackwardArgs& args)
      : state_(state),
        args_(args),
        clock_(state.whole_process_clock()),
        exchange_(state.transport, args.invocation, state.options.collective_timeout, &clock_,
                  state.device.get(), state.options.overlap),
        pairs_(static_cast<int64_t>(args.dalpha.size())) {}

  absl::StatusOr<BackwardResult> Run();

 private:
  absl::Status ExactRouterGradient();
  // A non-finite score is an error on all ranks that leaves the engine usable; it comes back in `refused`.
  absl::Status Score(absl::Status& refused);
  absl::Status Select();
  void ReportScores();
  absl::Status Route();
  absl::Status RetainedRouterGradient(CompactPass& compact);
  void Finish();
  InvocationReport::Phases& phases() { return context_.report.backward; }

  EngineState& state_;
  const BackwardArgs& args_;
  PhaseClock clock_;
  Exchange exchange_;
  const int64_t pairs_;
  int64_t bytes_before_ = 0;  // of other contexts
  ForwardContext context_;
  Buffer dy_copy_;                 // when the device cannot reach the caller's
  const std::byte* dy_ = nullptr;  // [T, H], where the device reads it
  bool selective_ = false;         // some expert keeps some of its pairs but not all
  Buffer scores_;                  // float, [P]
  Buffer kept_;                    // uint8, [P]
  std::vector<float> rescale_;     // [E]; empty: off
  BackwardRoute route_;
};

absl::Status BackwardPass::ExactRouterGradient() {
  if (context_.execution.router_gradient != RouterGradient::kExact) return absl::OkStatus();
  LRMOE_ASSIGN_OR_RETURN(Buffer token, state_.arena->Take(pairs_ * 4, "pair tokens"));
  int32_t* at = token.as<int32_t>().data();
  for (int32_t t = 0; t < static_cast<int32_t>(context_.num_tokens); ++t)
    at = std::fill_n(at, state_.shape().top_k, t);
  state_.device->RowDot(state_.type(), state_.shape().hidden_size, dy_, token.as<int32_t>(),
                        context_.y_rows.data(), context_.pair_position.as<int32_t>(), args_.dalpha.data());
  context_.y_rows.Release();
  return absl::OkStatus();
}

absl::Status BackwardPass::Score(absl::Status& refused) {
  const std::vector<bool> selective = SelectiveExperts(context_.plan());
  for (bool expert : selective) selective_ |= expert;
  if (!selective_) return absl::OkStatus();
  LRMOE_ASSIGN_OR_RETURN(scores_, state_.arena->Take(pairs_ * 4, "pair scores"));
  LRMOE_RETURN_IF_ERROR(ScorePairs(state_, context_, dy_, scores_.as<float>()));
  const absl::Status finite = CheckFinite(context_, state_.rank(), state_.shape().top_k, scores_.as<float>());
  int64_t bad = finite.ok() ? 0 : 1;
  LRMOE_RETURN_IF_ERROR(exchange_.Max("backward score check", std::span(&bad, 1)));
  if (bad != 0) refused = state_.Agree({Operation::kBackward, args_.invocation, "", 0, finite}).status();
  return absl::OkStatus();
}

absl::Status BackwardPass::Select() {
  const LayerPlan& plan = context_.plan();
  LRMOE_ASSIGN_OR_RETURN(kept_, state_.arena->Take(pairs_, "kept pairs"));
  const auto kept = kept_.as<uint8_t>();
  const auto instance = context_.pair_instance.as<int32_t>();
  {
    LRMOE_ASSIGN_OR_RETURN(Buffer expert, state_.arena->Take(pairs_ * 4, "pair experts"));
    std::vector<int32_t> expert_of(plan.instances.size());
    for (size_t i = 0; i < expert_of.size(); ++i) expert_of[i] = plan.instances[i].expert_idx;
    for (int64_t p = 0; p < pairs_; ++p) expert.as<int32_t>()[p] = expert_of[instance[p]];
    LRMOE_ASSIGN_OR_RETURN(const std::vector<float> dropped,
                           SelectPairs(exchange_, *state_.arena, plan, state_.store->owner(),
                                       expert.as<int32_t>(), scores_.as<float>(), kept));
    if (selective_ && context_.execution.selection == Selection::kLrmSampled)
      ReweighSampled(context_, state_.shape().top_k, expert.as<int32_t>(), kept, scores_.as<float>(),
                     dropped);
    if (context_.execution.rescale == Rescale::kRows) {
      rescale_ = RescaleFactors(plan);
      RescaleKept(context_, rescale_, expert.as<int32_t>(), kept);
    }
  }
  const size_t num_instances = plan.instances.size();
  route_.kept = KeptCounts(num_instances, state_.num_ranks());
  if (!selective_) {  // the plan says it all
    for (size_t i = 0; i < num_instances; ++i)
      for (int32_t s = 0; s < state_.num_ranks(); ++s)
        if (plan.quota[plan.instances[i].expert_idx] > 0)
          route_.kept.at(i, s) = static_cast<int32_t>(plan.instances[i].forward_rows_by_source[s]);
  } else {
    std::vector<int32_t> mine(num_instances, 0);
    for (int64_t p = 0; p < pairs_; ++p) mine[instance[p]] += kept[p];
    LRMOE_RETURN_IF_ERROR(exchange_.AllGather("backward kept counts", std::as_bytes(std::span(mine)),
                                              std::as_writable_bytes(route_.kept.all())));
  }
  ReportScores();
  if (!args_.kept.empty()) std::copy(kept.begin(), kept.end(), args_.kept.begin());
  scores_.Release();
  return absl::OkStatus();
}

void BackwardPass::ReportScores() {
  const auto kept = kept_.as<uint8_t>();
  InvocationReport& report = context_.report;
  report.kept_rows = std::accumulate(kept.begin(), kept.end(), int64_t{0});
  if (!selective_) return;
  const auto scores = scores_.as<float>();
  double total[4] = {}, of_kept[4] = {};  // sums that do not wait for each other
  for (size_t p = 0; p < scores.size(); ++p) {
    total[p % 4] += scores[p];
    of_kept[p % 4] += scores[p] * static_cast<float>(kept[p]);
  }
  report.total_score = std::accumulate(std::begin(total), std::end(total), 0.0);
  report.kept_score = std::accumulate(std::begin(of_kept), std::end(of_kept), 0.0);
}

absl::Status BackwardPass::Route() {
  const LayerPlan& plan = context_.plan();
  std::vector<int32_t> node = state_.options.nodes;
  if (node.empty()) node.assign(state_.num_ranks(), 0);
  route_.moves = PlanMoves(plan, route_.kept, node);
  route_.source = SegmentsFrom(plan, route_.kept, route_.moves, state_.rank());
  route_.executor = SegmentsAt(plan, route_.kept, route_.moves, state_.rank());
  LRMOE_ASSIGN_OR_RETURN(route_.pair_target, state_.arena->Take(pairs_ * 4, "pair targets"));
  LRMOE_ASSIGN_OR_RETURN(route_.pair_position, state_.arena->Take(pairs_ * 4, "pair positions"));
  TargetPairs(route_.source, plan.instances.size(), context_.pair_instance.as<int32_t>(), kept_.as<uint8_t>(),
              route_.pair_target.as<int32_t>(), route_.pair_position.as<int32_t>());
  context_.report.backward_rows = route_.executor.rows;
  for (const Move& move : route_.moves)
    if (plan.instances[move.from_instance].rank_idx == state_.rank())
      context_.report.moved_rows += move.count;
  return absl::OkStatus();
}

absl::Status BackwardPass::RetainedRouterGradient(CompactPass& compact) {
  if (context_.execution.router_gradient == RouterGradient::kExact) return absl::OkStatus();
  const int64_t rows =
      std::accumulate(route_.source.send_rows.begin(), route_.source.send_rows.end(), int64_t{0});
  LRMOE_ASSIGN_OR_RETURN(Buffer returned, state_.arena->Take(rows * 4, "router gradients"));
  LRMOE_RETURN_IF_ERROR(compact.ReturnScalars(returned));
  const auto position = route_.pair_position.as<int32_t>();
  const auto instance = context_.pair_instance.as<int32_t>();
  for (int64_t p = 0; p < pairs_; ++p) {
    args_.dalpha[p] = position[p] < 0 ? 0.0F : returned.as<float>()[position[p]];
    if (!rescale_.empty()) args_.dalpha[p] *= rescale_[context_.plan().instances[instance[p]].expert_idx];
  }
  return absl::OkStatus();
}

void BackwardPass::Finish() {
  InvocationReport& report = context_.report;
  const int64_t tensors = std::max(context_.tensor_peak_bytes, state_.arena->peak_bytes() - bytes_before_);
  report.peak_bytes = state_.store->bytes(args_.invocation.layer) + tensors;
  state_.peak_bytes = std::max(state_.peak_bytes, state_.ExpertBytes() + state_.arena->peak_bytes());
  phases().total_ms = clock_.total_ms();
  phases().cpu_ms = clock_.cpu_ms();
}

absl::StatusOr<BackwardResult> BackwardPass::Run() {
  LRMOE_RETURN_IF_ERROR(
      state_.Agree({Operation::kBackward, args_.invocation, "", 0, CheckArgs(state_, args_)}).status());
  // From here the context is gone whatever happens.
  bytes_before_ = state_.arena->bytes_in_use() - state_.contexts.Find(args_.invocation)->bytes();
  context_ = state_.contexts.Take(args_.invocation);
  state_.arena->MarkPeak();
  InvocationReport& report = context_.report;
  CompactPass compact(state_, exchange_, context_, route_);
  absl::Status refused;
  const auto body = [&]() -> absl::Status {
    LRMOE_ASSIGN_OR_RETURN(dy_, state_.OnDevice(args_.dy, dy_copy_));
    LRMOE_RETURN_IF_ERROR(ExactRouterGradient());  // first: it frees the saved y rows
    clock_.Lap(phases().compute_ms);
    LRMOE_RETURN_IF_ERROR(Score(refused));
    clock_.Lap(phases().score_ms);
    if (!refused.ok()) return absl::OkStatus();
    LRMOE_RETURN_IF_ERROR(Select());
    clock_.Lap(phases().select_ms);
    LRMOE_RETURN_IF_ERROR(Route());
    LRMOE_RETURN_IF_ERROR(compact.DescribeRows());
    report.scalar_bytes = exchange_.TakeSentBytes();
    LRMOE_RETURN_IF_ERROR(compact.CompactSaved());
    LRMOE_RETURN_IF_ERROR(compact.PackGradients(dy_));
    dy_copy_.Release();
    clock_.Lap(phases().pack_ms);
    LRMOE_RETURN_IF_ERROR(compact.StartDispatch());
    report.dispatch_bytes = exchange_.TakeSentBytes();
    clock_.Lap(phases().dispatch_ms);
    LRMOE_RETURN_IF_ERROR(compact.Recompute());
    clock_.Lap(phases().compute_ms);
    LRMOE_RETURN_IF_ERROR(compact.FinishDispatch());
    clock_.Lap(phases().dispatch_ms);
    LRMOE_RETURN_IF_ERROR(compact.Compute());
    clock_.Lap(phases().compute_ms);
    LRMOE_RETURN_IF_ERROR(RetainedRouterGradient(compact));
    report.scalar_bytes += exchange_.TakeSentBytes();
    LRMOE_RETURN_IF_ERROR(compact.StartReturn());
    report.return_bytes = exchange_.TakeSentBytes();
    clock_.Lap(phases().return_ms);
    LRMOE_RETURN_IF_ERROR(compact.ComputeLast());
    clock_.Lap(phases().compute_ms);
    LRMOE_RETURN_IF_ERROR(compact.FinishReturn(args_.dx));
    clock_.Lap(phases().return_ms);
    LRMOE_RETURN_IF_ERROR(SumGradients(exchange_, state_.rows(), *state_.store, context_.plan()));
    clock_.Lap(phases().gradients_ms);
    return state_.device->Wait();
  };
  if (absl::Status status = body(); !status.ok()) return state_.Fail(status);
  const int32_t layer = args_.invocation.layer;
  if (!refused.ok()) {
    state_.DropUnusedReplicas(layer);
    return refused;
  }
  Finish();
  state_.plans->Report(report);
  state_.DropUnusedReplicas(layer);
  return BackwardResult{report, exchange_.times()};
}

}  // namespace

absl::StatusOr<BackwardResult> RunBackward(EngineState& state, const BackwardArgs& args) {
  return BackwardPass(state, args).Run();
}

}  // namespace lrmoe::engine
