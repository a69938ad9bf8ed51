// The compact backward pass: score, select, route, exchange only kept rows, four grouped GEMMs on the real
// row counts, return (paper, Algorithm 1, lines 15-22; design "Backward").
#include <algorithm>
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
        clock_(state.StartClock()),
        exchange_(state.transport, args.invocation, state.options.collective_timeout, &clock_,
                  state.device.get(), state.options.overlap),
        pairs_(static_cast<int64_t>(args.dalpha.size())) {}

  absl::StatusOr<BackwardResult> Run();

 private:
  absl::Status ExactRouterGradient();
  absl::Status Score();
  // A non-finite score is an error on all ranks that leaves the engine usable; it comes back in `refused`.
  absl::Status Select(absl::Status& refused);
  absl::Status Route();
  absl::Status ReportKept();
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
  int64_t bad_pair_ = -1;          // the first whose score is not finite
  Buffer scores_;                  // float, [P], by position
  BackwardRoute route_;
};

absl::Status BackwardPass::ExactRouterGradient() {
  if (context_.execution.router_gradient != RouterGradient::kExact) return absl::OkStatus();
  LRMOE_ASSIGN_OR_RETURN(Buffer token, state_.rows().Take(pairs_ * 4, "pair tokens"));
  LRMOE_ASSIGN_OR_RETURN(Buffer dalpha, state_.rows().Take(pairs_ * 4, "router gradients"));
  state_.device->CountRepeated(pairs_, state_.shape().top_k, token.as<int32_t>().data());
  state_.device->RowDot(state_.type(), state_.shape().hidden_size, dy_, token.as<int32_t>(),
                        context_.y_rows.data(), context_.pair_position.as<int32_t>(),
                        dalpha.as<float>().data());
  state_.device->Download(args_.dalpha.data(), dalpha.data(), dalpha.size());
  context_.y_rows.Release();
  return absl::OkStatus();
}

absl::Status BackwardPass::Score() {
  const std::vector<bool> selective = SelectiveExperts(context_.plan());
  selective_ = std::find(selective.begin(), selective.end(), true) != selective.end();
  if (selective_) {
    LRMOE_ASSIGN_OR_RETURN(scores_, state_.rows().Take(pairs_ * 4, "pair scores"));
    LRMOE_RETURN_IF_ERROR(ScorePairs(state_, context_, dy_, scores_, std::span(&bad_pair_, 1)));
  }
  context_.norm2.Release();
  return absl::OkStatus();
}

// Kept counts of all ranks; with them each rank says whether all its scores were finite.
absl::Status BackwardPass::Select(absl::Status& refused) {
  const LayerPlan& plan = context_.plan();
  const size_t num_instances = plan.instances.size();
  Selector selector(state_, exchange_, context_);
  LRMOE_RETURN_IF_ERROR(selector.Select(scores_));
  if (selective_) selector.CorrectWeights(scores_);
  LRMOE_ASSIGN_OR_RETURN(route_.selected, selector.Finish());
  route_.kept = KeptCounts(num_instances, state_.num_ranks());
  if (!selective_) {  // the plan says it all
    for (size_t i = 0; i < num_instances; ++i)
      for (int32_t s = 0; s < state_.num_ranks(); ++s)
        if (plan.quota[plan.instances[i].expert_idx] > 0)
          route_.kept.at(i, s) = static_cast<int32_t>(plan.instances[i].forward_rows_by_source[s]);
  } else {
    const absl::Status finite = CheckFinite(state_, context_, bad_pair_, scores_);
    std::vector<int32_t> mine = route_.selected.num_kept;
    mine.push_back(finite.ok() ? 0 : 1);
    std::vector<int32_t> all(mine.size() * state_.num_ranks());
    LRMOE_RETURN_IF_ERROR(exchange_.AllGather("backward kept counts", std::as_bytes(std::span(mine)),
                                              std::as_writable_bytes(std::span(all))));
    bool bad = false;
    for (int32_t s = 0; s < state_.num_ranks(); ++s) {
      const auto of_source = std::span(all).subspan(s * mine.size(), mine.size());
      std::copy_n(of_source.begin(), num_instances, route_.kept.source(s).begin());
      bad |= of_source.back() != 0;
    }
    if (bad) {
      refused = state_.Agree({Operation::kBackward, args_.invocation, "", 0, finite}).status();
      return absl::OkStatus();
    }
  }
  scores_.Release();
  context_.pair_position.Release();
  InvocationReport& report = context_.report;
  const std::span<const int32_t> kept = route_.kept.source(state_.rank());
  report.kept_rows = std::accumulate(kept.begin(), kept.end(), int64_t{0});
  report.total_score = route_.selected.total_score;
  report.kept_score = route_.selected.kept_score;
  return absl::OkStatus();
}

absl::Status BackwardPass::Route() {
  const LayerPlan& plan = context_.plan();
  std::vector<int32_t> node = state_.options.nodes;
  if (node.empty()) node.assign(state_.num_ranks(), 0);
  route_.moves = PlanMoves(plan, route_.kept, node);
  route_.source = SegmentsFrom(plan, route_.kept, route_.moves, state_.rank());
  route_.executor = SegmentsAt(plan, route_.kept, route_.moves, state_.rank());
  // The pairs that an instance kept, into the stretches that the route cuts them into.
  const std::vector<int64_t>& first_position = context_.route.first_position;
  const Buffer kept_pair = std::move(route_.selected.kept_pair);
  LRMOE_ASSIGN_OR_RETURN(route_.sent_pair, state_.rows().Take(pairs_ * 4, "backward pairs"));
  std::vector<kernels::Stretch> stretches;
  stretches.reserve(route_.source.segments.size());
  for (const Segment& segment : route_.source.segments)
    stretches.push_back(
        {first_position[segment.from_instance] + segment.first_kept, segment.position, segment.count});
  state_.device->CopyStretches(stretches, kept_pair.data(), route_.sent_pair.data());
  LRMOE_RETURN_IF_ERROR(ReportKept());
  context_.report.backward_rows = route_.executor.rows;
  for (const Move& move : route_.moves)
    if (plan.instances[move.from_instance].rank_idx == state_.rank())
      context_.report.moved_rows += move.count;
  return absl::OkStatus();
}

// Which pairs run, where the caller asked for it.
absl::Status BackwardPass::ReportKept() {
  if (args_.kept.empty()) return absl::OkStatus();
  const int64_t sent = Sum(route_.source.send_rows);
  std::span<const int32_t> pairs = route_.sent_pair.as<int32_t>().first(sent);
  Buffer copy;
  if (state_.device_rows) {
    LRMOE_ASSIGN_OR_RETURN(copy, state_.arena->Take(sent * 4, "kept pairs"));
    state_.device->Download(copy.data(), route_.sent_pair.data(), copy.size());
    LRMOE_RETURN_IF_ERROR(state_.device->Wait());
    pairs = copy.as<int32_t>();
  }
  std::fill(args_.kept.begin(), args_.kept.end(), uint8_t{0});
  for (const int32_t pair : pairs) args_.kept[pair] = 1;
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
    LRMOE_RETURN_IF_ERROR(Score());
    clock_.Lap(phases().score_ms);
    LRMOE_RETURN_IF_ERROR(Select(refused));
    clock_.Lap(phases().select_ms);
    if (!refused.ok()) return absl::OkStatus();
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
    if (context_.execution.router_gradient == RouterGradient::kRetained)
      LRMOE_RETURN_IF_ERROR(compact.ReturnScalars(args_.dalpha));
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
