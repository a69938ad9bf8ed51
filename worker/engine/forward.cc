// The complete forward pass: plan, weights, dispatch, FC1, activation, FC2, return, combine (paper, section
// 3; design "Forward"). Nothing is ever dropped here.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/status_macros.h"
#include "worker/engine/check_pairs.h"
#include "worker/engine/engine_state.h"
#include "worker/engine/payload.h"

namespace lrmoe::engine {
namespace {

absl::Status CheckArgs(const EngineState& state, const ForwardArgs& args) {
  const LayerShape& shape = state.shape();
  const Invocation& invocation = args.invocation;
  if (invocation.layer < 0 || invocation.layer >= state.options.model.num_layers)
    return absl::InvalidArgumentError(
        absl::StrCat("layer is ", invocation.layer, "; allowed: 0..", state.options.model.num_layers - 1));
  const int64_t limit = (int64_t{1} << 31) / shape.top_k - 1;
  if (args.num_tokens < 0 || args.num_tokens > limit)
    return absl::InvalidArgumentError(
        absl::StrCat("num_tokens is ", args.num_tokens, "; allowed: 0..", limit));
  const int64_t pairs = args.num_tokens * shape.top_k;
  LRMOE_RETURN_IF_ERROR(CheckSize("x (bytes)", args.x.size(), args.num_tokens * state.row_bytes()));
  LRMOE_RETURN_IF_ERROR(CheckSize("y (bytes)", args.y.size(), args.num_tokens * state.row_bytes()));
  LRMOE_RETURN_IF_ERROR(CheckSize("expert_idx (elements)", args.expert_idx.size(), pairs));
  LRMOE_RETURN_IF_ERROR(CheckSize("alpha (elements)", args.alpha.size(), pairs));
  LRMOE_RETURN_IF_ERROR(CheckPairs(args, shape.num_experts, shape.top_k));
  if (state.store->version(invocation.layer) == ParameterVersion{0})
    return absl::FailedPreconditionError(absl::StrCat(
        "layer ", invocation.layer, " has no weights: load its experts and finish the load first"));
  return args.needs_backward ? state.contexts.CheckRoom(invocation) : absl::OkStatus();
}

// Says enough of a plan that two ranks with different ones notice.
std::string Fingerprint(const ExecutionPlan& execution) {
  uint64_t hash = execution.seed ^ (static_cast<uint64_t>(execution.selection) << 8) ^
                  (static_cast<uint64_t>(execution.router_gradient) << 16) ^
                  (static_cast<uint64_t>(execution.rescale) << 24);
  const auto mix = [&hash](int64_t value) {
    hash = (hash ^ static_cast<uint64_t>(value)) * 0x100000001B3ULL;
  };
  for (int64_t quota : execution.plan.quota) mix(quota);
  for (const InstancePlan& instance : execution.plan.instances) {
    mix(instance.expert_idx);
    mix(instance.rank_idx);
    mix(instance.backward_rows);
    for (int64_t rows : instance.forward_rows_by_source) mix(rows);
  }
  return absl::StrCat("plan ", absl::Hex(hash, absl::kZeroPad16), ", retention rate ",
                      execution.plan.retention_rate);
}

// The local instances whose y rows return together: consecutive ones, and so are their rows.
struct Piece {
  int32_t number = 0;
  size_t first_local = 0, num_locals = 0;
  int64_t first_row = 0, rows = 0;
};

class ForwardPass {
 public:
  ForwardPass(EngineState& state, const ForwardArgs& args)
      : state_(state),
        args_(args),
        clock_(state.StartClock()),
        exchange_(state.transport, args.invocation, state.options.collective_timeout, &clock_,
                  state.device.get(), state.options.overlap),
        pairs_(static_cast<int64_t>(args.expert_idx.size())) {}

  absl::StatusOr<ForwardResult> Run();

 private:
  absl::Status Plan();
  absl::Status Admit();
  absl::Status PlacePairs();
  absl::Status Replicas();
  absl::Status Dispatch();
  absl::Status Activate();
  absl::Status ComputeAndReturn();
  absl::Status ComputePiece(const Piece& piece, Buffer& y);
  absl::Status StartReturn(const Piece& piece, const Buffer& y, RowsUnderWay& under_way);
  absl::Status ReturnNorms();
  absl::Status Combine();
  InvocationReport::Phases& phases() { return context_.report.forward; }
  absl::Status Fc(int64_t n, int64_t k, const std::byte* in, int64_t weight_offset, std::byte* out,
                  std::span<const LocalInstance> locals);

  EngineState& state_;
  const ForwardArgs& args_;
  PhaseClock clock_;
  Exchange exchange_;
  const int64_t pairs_;
  int64_t bytes_before_ = 0;
  ForwardContext context_;
  Buffer sent_pair_;               // int32, [P]: the pairs in send order, until they are dispatched
  Buffer row_norm2_;               // float, in row order
  Buffer phi_;                     // [R, F], in row order
  std::vector<int32_t> piece_of_;  // [instance]: when its y rows return
  // Of two pieces in turns; rows under way behind the buffers they use.
  Buffer y_[2];
  RowsUnderWay under_way_[2];
};

absl::Status ForwardPass::Plan() {
  Proposal proposal{Operation::kForward, args_.invocation,
                    args_.needs_backward ? "with backward" : "evaluation", args_.num_tokens,
                    CheckArgs(state_, args_)};
  LRMOE_ASSIGN_OR_RETURN(const Agreement agreement, state_.Agree(proposal));
  for (int32_t r = 0; r < state_.rank(); ++r) context_.token_offset += agreement.num_tokens[r];
  state_.contexts.DropBefore(args_.invocation);

  std::vector<int64_t> counts(state_.shape().num_experts, 0);
  for (int32_t e : args_.expert_idx) ++counts[e];
  absl::StatusOr<ExecutionPlan> execution =
      state_.plans->Plan(args_.invocation, counts, After(state_.options.plan_timeout));
  proposal.status = execution.status();
  proposal.arguments.clear();
  if (execution.ok()) {
    context_.execution = *std::move(execution);
    proposal.arguments = Fingerprint(context_.execution);
    proposal.status = CheckExecutable(context_.plan(), state_.store->owner(), state_.rank(), counts);
    if (context_.plan().invocation != args_.invocation)
      proposal.status =
          absl::InternalError(absl::StrCat("the plan is for ", ToString(context_.plan().invocation)));
    if (proposal.status.ok()) proposal.status = Admit();
  }
  // Plans come to each rank by its own session: only after this does every rank know that all can go on.
  return state_.Agree(proposal).status();
}

// Memory and routing. The rows, most of what the forward needs, are taken here, so that a plan that does not
// fit is an error on all ranks and not a failure in the middle.
absl::Status ForwardPass::Admit() {
  const MemoryBytes predicted = state_.Predict(context_.execution, args_.num_tokens);
  context_.report.predicted_bytes = predicted.total();
  int64_t new_replicas = 0;
  for (const ExpertTransfer& transfer : state_.replicas.Missing(
           context_.plan(), state_.store->owner(), state_.store->version(args_.invocation.layer)))
    new_replicas += transfer.to == state_.rank() &&
                    state_.store->Find(args_.invocation.layer, transfer.expert_idx) == nullptr;
  const int64_t held = state_.ExpertBytes() + state_.arena->bytes_in_use();
  const int64_t wanted = predicted.tokens + predicted.staging + new_replicas * state_.memory[0].replica_bytes;
  if (wanted > state_.options.memory_budget_bytes - held)
    return absl::ResourceExhaustedError(absl::StrCat("the plan of ", ToString(args_.invocation), " needs ",
                                                     wanted, " bytes, ", held, " of memory_budget_bytes ",
                                                     state_.options.memory_budget_bytes, " are in use (",
                                                     state_.contexts.size(), " open forwards)"));
  bytes_before_ = state_.arena->bytes_in_use();
  state_.arena->MarkPeak();
  ForwardContext& c = context_;
  c.route = RouteForward(c.plan(), state_.rank());
  LRMOE_RETURN_IF_ERROR(PlacePairs());
  LRMOE_ASSIGN_OR_RETURN(c.x, state_.rows().Take(c.route.rows * state_.row_bytes(), "dispatched rows"));
  return absl::OkStatus();
}

// The pairs in send order, and each pair's place there.
absl::Status ForwardPass::PlacePairs() {
  Arena& arena = state_.rows();
  kernels::Device& device = *state_.device;
  LRMOE_ASSIGN_OR_RETURN(context_.pair_position, arena.Take(pairs_ * 4, "pairs"));
  LRMOE_ASSIGN_OR_RETURN(sent_pair_, arena.Take(pairs_ * 4, "dispatched pairs"));
  const int64_t num_experts = state_.shape().num_experts;
  Buffer copy;
  LRMOE_ASSIGN_OR_RETURN(const std::byte* const expert,
                         state_.OnDevice(std::as_bytes(args_.expert_idx), copy));
  LRMOE_ASSIGN_OR_RETURN(Buffer offset, arena.Take((num_experts + 2) * 8, "pairs by expert"));
  LRMOE_ASSIGN_OR_RETURN(Buffer by_expert, arena.Take(pairs_ * 4, "pairs by expert"));
  device.GroupByKey(pairs_, reinterpret_cast<const int32_t*>(expert), num_experts,
                    offset.as<int64_t>().data(), by_expert.as<int32_t>().data());
  device.CopyStretches(SendOrder(context_.plan(), context_.route, state_.rank()), by_expert.data(),
                       sent_pair_.data());
  device.Invert(pairs_, sent_pair_.as<int32_t>().data(), context_.pair_position.as<int32_t>().data());
  return absl::OkStatus();
}

absl::Status ForwardPass::Replicas() {
  const int32_t layer = args_.invocation.layer;
  context_.version = state_.store->version(layer);
  const std::vector<ExpertTransfer> missing =
      state_.replicas.Missing(context_.plan(), state_.store->owner(), context_.version);
  state_.replicas.SetLatest(context_.plan());
  state_.DropUnusedReplicas(layer);
  LRMOE_RETURN_IF_ERROR(
      BringWeights(exchange_, state_.rows(), *state_.store, layer, missing, context_.version));
  state_.replicas.SetHeld(context_.plan(), context_.version);
  return absl::OkStatus();
}

// Every pair's x row to its executor; a token goes once to a rank, with an index per pair.
absl::Status ForwardPass::Dispatch() {
  Arena& arena = state_.rows();
  ForwardContext& c = context_;
  kernels::Device& device = *state_.device;
  const int32_t num_ranks = state_.num_ranks();
  LRMOE_ASSIGN_OR_RETURN(Buffer index_in, arena.Take(c.route.rows * 4, "dispatch index"));
  Payload payload;
  {
    const Buffer sent_pair = std::move(sent_pair_);
    LRMOE_ASSIGN_OR_RETURN(payload, PackPayload(state_, args_.num_tokens, sent_pair, c.route.send_rows));
    LRMOE_ASSIGN_OR_RETURN(Buffer index_out, arena.Take(pairs_ * 4, "dispatch index"));
    device.GatherWords(pairs_, sent_pair.as<int32_t>().data(), payload.pair_row.data(), index_out.data());
    payload.pair_row.Release();
    LRMOE_RETURN_IF_ERROR(exchange_.Rows("forward dispatch index", index_out.bytes(), c.route.send_rows,
                                         index_in.bytes(), c.route.recv_rows, 4));
  }
  std::vector<kernels::Range> from_source;
  from_source.reserve(num_ranks);
  const std::vector<int64_t> first_position = Offsets(c.route.recv_rows);
  for (int32_t s = 0; s < num_ranks; ++s) from_source.push_back({first_position[s], c.route.recv_rows[s]});
  LRMOE_ASSIGN_OR_RETURN(const std::vector<int64_t> payload_rows,
                         RowsFromSources(state_, payload, from_source, index_in));
  LRMOE_ASSIGN_OR_RETURN(Buffer payload_in,
                         arena.Take(c.route.rows * state_.row_bytes(), "dispatch payload"));
  {
    LRMOE_ASSIGN_OR_RETURN(Buffer payload_out, arena.Take(pairs_ * state_.row_bytes(), "dispatch payload"));
    Buffer copy;
    LRMOE_ASSIGN_OR_RETURN(const std::byte* const x, state_.OnDevice(args_.x, copy));
    device.GatherRows(state_.type(), state_.shape().hidden_size, x,
                      payload.token.as<int32_t>().first(payload.total), payload_out.data());
    LRMOE_RETURN_IF_ERROR(exchange_.Rows("forward dispatch", payload_out.bytes(), payload.rows,
                                         payload_in.bytes(), payload_rows, state_.row_bytes()));
    payload.token.Release();
  }
  const std::vector<int64_t> base = Offsets(payload_rows);
  LRMOE_ASSIGN_OR_RETURN(Buffer gather, arena.Take(c.route.rows * 4, "dispatch gather"));
  std::vector<kernels::Stretch> stretches;
  stretches.reserve(c.route.runs.size());
  for (const RowRun& run : c.route.runs)
    stretches.push_back({run.position, run.row, run.count, static_cast<int32_t>(base[run.source_idx])});
  device.CopyStretches(stretches, index_in.data(), gather.data());
  device.GatherRows(state_.type(), state_.shape().hidden_size, payload_in.data(), gather.as<int32_t>(),
                    c.x.data());
  return absl::OkStatus();
}

absl::Status ForwardPass::Fc(int64_t n, int64_t k, const std::byte* in, int64_t weight_offset, std::byte* out,
                             std::span<const LocalInstance> locals) {
  const int64_t bytes = state_.element_bytes();
  std::vector<kernels::GemmGroup> groups;
  for (const LocalInstance& local : locals) {
    const ExpertInstance* expert = state_.store->Find(args_.invocation.layer, local.expert_idx);
    LRMOE_CHECK(expert != nullptr);
    const int64_t row = local.first_row - locals.front().first_row;
    groups.push_back(
        {in + row * k * bytes, expert->weights + weight_offset * bytes, out + row * n * bytes, local.rows});
  }
  if (groups.empty()) return absl::OkStatus();
  const auto kind = state_.store->packed() ? kernels::GemmKind::kPacked : kernels::GemmKind::kForward;
  return state_.device->GroupedGemm(kind, state_.type(), n, k, groups);
}

absl::Status ForwardPass::Activate() {
  Arena& arena = state_.rows();
  ForwardContext& c = context_;
  const LayerShape& shape = state_.shape();
  const int64_t rows = c.route.rows, f = shape.intermediate_size, width = shape.fc1_width();
  LRMOE_ASSIGN_OR_RETURN(c.a, arena.Take(rows * width * state_.element_bytes(), "FC1 rows"));
  LRMOE_RETURN_IF_ERROR(Fc(width, shape.hidden_size, c.x.data(), 0, c.a.data(), c.route.local));
  if (!args_.needs_backward) c.x.Release();
  LRMOE_ASSIGN_OR_RETURN(phi_, arena.Take(rows * f * state_.element_bytes(), "activated rows"));
  LRMOE_ASSIGN_OR_RETURN(row_norm2_, arena.Take(rows * 4, "row norms"));
  state_.device->ActivationForward(state_.activation(), state_.type(), rows, f, c.a.data(), phi_.data(),
                                   row_norm2_.as<float>().data());
  if (!args_.needs_backward || state_.options.recompute_activation) c.a.Release();
  return absl::OkStatus();
}

// FC2, and its rows back to their sources: a piece is under way while the next is computed.
absl::Status ForwardPass::ComputeAndReturn() {
  LRMOE_RETURN_IF_ERROR(Activate());
  const int64_t least_rows = std::max<int64_t>(1, state_.options.least_piece_bytes / state_.row_bytes());
  piece_of_.assign(context_.plan().instances.size(), 0);
  if (state_.options.overlap && state_.num_ranks() > 1)
    piece_of_ = ReturnPieces(context_.plan(), state_.shape().hidden_size, state_.shape().intermediate_size,
                             least_rows);
  int32_t last = 0;
  for (const int32_t piece : piece_of_) last = std::max(last, piece);
  size_t end_local = context_.route.local.size();
  for (int32_t number = 0; number <= last; ++number) {
    Piece piece{number, end_local};
    while (piece.first_local > 0 &&
           piece_of_[context_.route.local[piece.first_local - 1].instance_idx] == number) {
      --piece.first_local;
      piece.rows += context_.route.local[piece.first_local].rows;
    }
    piece.num_locals = end_local - piece.first_local;
    if (piece.num_locals > 0) piece.first_row = context_.route.local[piece.first_local].first_row;
    end_local = piece.first_local;
    const int here = number % 2, before = 1 - here;
    LRMOE_RETURN_IF_ERROR(ComputePiece(piece, y_[here]));
    clock_.Lap(phases().compute_ms);
    LRMOE_RETURN_IF_ERROR(StartReturn(piece, y_[here], under_way_[here]));
    LRMOE_RETURN_IF_ERROR(exchange_.Finish(under_way_[before]));
    y_[before].Release();
    clock_.Lap(phases().return_ms);
  }
  LRMOE_RETURN_IF_ERROR(exchange_.Finish(under_way_[last % 2]));
  y_[last % 2].Release();
  return absl::OkStatus();
}

absl::Status ForwardPass::ComputePiece(const Piece& piece, Buffer& y) {
  const int64_t h = state_.shape().hidden_size, f = state_.shape().intermediate_size;
  const int64_t phi_row = f * state_.element_bytes();
  LRMOE_ASSIGN_OR_RETURN(y, state_.rows().Take(piece.rows * state_.row_bytes(), "FC2 rows"));
  if (piece.rows == 0) return absl::OkStatus();
  LRMOE_RETURN_IF_ERROR(Fc(h, f, phi_.data() + piece.first_row * phi_row, state_.store->w2_offset(), y.data(),
                           std::span(context_.route.local).subspan(piece.first_local, piece.num_locals)));
  phi_.Shrink(piece.first_row * phi_row);
  return absl::OkStatus();
}

// Rows of a piece are by (instance, source), what goes to a source must lie together: sorted in place,
// because a second copy of y would be the forward's largest use of memory.
absl::Status ForwardPass::StartReturn(const Piece& piece, const Buffer& y, RowsUnderWay& under_way) {
  const int32_t num_ranks = state_.num_ranks();
  const int64_t row_bytes = state_.row_bytes();
  std::vector<int64_t> rows_to(num_ranks, 0);
  const auto runs = [&](const auto& use) {
    for (const RowRun& run : context_.route.runs) {
      const auto local = static_cast<size_t>(run.local_idx);
      if (local >= piece.first_local && local < piece.first_local + piece.num_locals) use(run);
    }
  };
  runs([&](const RowRun& run) { rows_to[run.source_idx] += run.count; });
  const std::vector<int64_t> base = Offsets(rows_to);
  if (num_ranks > 1) {  // else it is the same order
    LRMOE_ASSIGN_OR_RETURN(Buffer target, state_.rows().Take(piece.rows * 4, "return order"));
    std::vector<int64_t> next = base;
    std::vector<kernels::Stretch> stretches;
    stretches.reserve(context_.route.runs.size());
    runs([&](const RowRun& run) {
      stretches.push_back({next[run.source_idx], run.row - piece.first_row, run.count});
      next[run.source_idx] += run.count;
    });
    state_.device->CountStretches(stretches, target.as<int32_t>().data());
    state_.device->PermuteRows(row_bytes, target.as<int32_t>(), y.data());
  }
  if (piece.number == 0) {
    LRMOE_ASSIGN_OR_RETURN(context_.y_rows, state_.rows().Take(pairs_ * row_bytes, "returned rows"));
  }
  // At the source, rows are by (executor rank, instance): those of a piece lie together for each executor,
  // behind the rows of its earlier instances, which return later.
  std::vector<std::span<const std::byte>> send;
  std::vector<std::span<std::byte>> recv;
  const std::vector<int64_t> first = Offsets(context_.route.send_rows);
  std::vector<int64_t> skipped(num_ranks, 0), wanted(num_ranks, 0);
  for (size_t i = 0; i < piece_of_.size(); ++i) {
    const InstancePlan& instance = context_.plan().instances[i];
    const int64_t rows = instance.forward_rows_by_source[state_.rank()];
    if (piece_of_[i] > piece.number) skipped[instance.rank_idx] += rows;
    if (piece_of_[i] == piece.number) wanted[instance.rank_idx] += rows;
  }
  for (int32_t r = 0; r < num_ranks; ++r) {
    send.push_back(y.bytes().subspan(base[r] * row_bytes, rows_to[r] * row_bytes));
    recv.push_back(
        context_.y_rows.bytes().subspan((first[r] + skipped[r]) * row_bytes, wanted[r] * row_bytes));
  }
  LRMOE_ASSIGN_OR_RETURN(under_way, exchange_.Start("forward return", send, recv));
  return absl::OkStatus();
}

// ||phi||^2 of each pair to its source.
absl::Status ForwardPass::ReturnNorms() {
  Arena& arena = state_.rows();
  ForwardContext& c = context_;
  if (state_.num_ranks() > 1) {  // else it is the same order
    LRMOE_ASSIGN_OR_RETURN(Buffer by_position, arena.Take(c.route.rows * 4, "row norms"));
    std::vector<kernels::Stretch> stretches;
    stretches.reserve(c.route.runs.size());
    for (const RowRun& run : c.route.runs) stretches.push_back({run.row, run.position, run.count});
    state_.device->CopyStretches(stretches, row_norm2_.data(), by_position.data());
    row_norm2_ = std::move(by_position);
  }
  LRMOE_ASSIGN_OR_RETURN(c.norm2, arena.Take(pairs_ * 4, "pair norms"));
  LRMOE_RETURN_IF_ERROR(exchange_.Rows("forward norms", row_norm2_.bytes(), c.route.recv_rows,
                                       c.norm2.bytes(), c.route.send_rows, 4));
  row_norm2_.Release();
  return absl::OkStatus();
}

// The weighted sum of each token's rows in slot order.
absl::Status ForwardPass::Combine() {
  ForwardContext& c = context_;
  if (args_.needs_backward) LRMOE_RETURN_IF_ERROR(ReturnNorms());
  LRMOE_ASSIGN_OR_RETURN(c.alpha, state_.rows().Take(pairs_ * 4, "routing weights"));
  state_.device->Upload(c.alpha.data(), args_.alpha.data(), pairs_ * 4);
  Buffer copy;
  LRMOE_ASSIGN_OR_RETURN(std::byte* const y, state_.ForDevice(args_.y, copy));
  state_.device->CombineRows(state_.type(), state_.shape().hidden_size, args_.num_tokens,
                             state_.shape().top_k, c.y_rows.data(), c.pair_position.as<int32_t>().data(),
                             c.alpha.as<float>().data(), y);
  if (c.execution.router_gradient != RouterGradient::kExact) c.y_rows.Release();
  state_.Deliver(args_.y, copy);
  return state_.device->Wait();
}

absl::StatusOr<ForwardResult> ForwardPass::Run() {
  LRMOE_RETURN_IF_ERROR(Plan());
  clock_.Lap(phases().plan_ms);
  const auto body = [&]() -> absl::Status {
    LRMOE_RETURN_IF_ERROR(Replicas());
    clock_.Lap(phases().weights_ms);
    LRMOE_RETURN_IF_ERROR(Dispatch());
    clock_.Lap(phases().dispatch_ms);
    LRMOE_RETURN_IF_ERROR(ComputeAndReturn());
    LRMOE_RETURN_IF_ERROR(Combine());
    clock_.Lap(phases().return_ms);
    return absl::OkStatus();
  };
  if (absl::Status status = body(); !status.ok()) return state_.Fail(status);

  InvocationReport& report = context_.report;
  report.invocation = args_.invocation;
  report.routed_rows = pairs_;
  report.kept_rows = 0;
  report.forward_rows = context_.route.rows;
  context_.num_tokens = args_.num_tokens;
  context_.tensor_peak_bytes = state_.arena->peak_bytes() - bytes_before_;
  report.peak_bytes = state_.store->bytes(args_.invocation.layer) + context_.tensor_peak_bytes;
  state_.peak_bytes = std::max(state_.peak_bytes, state_.ExpertBytes() + state_.arena->peak_bytes());
  phases().total_ms = clock_.total_ms();
  phases().cpu_ms = clock_.cpu_ms();

  ForwardResult result{context_.execution, report, exchange_.times()};
  if (args_.needs_backward) {
    state_.contexts.Insert(args_.invocation, std::move(context_));
  } else {
    context_ = {};
    state_.plans->Report(report);
  }
  return result;
}

}  // namespace

absl::StatusOr<ForwardResult> RunForward(EngineState& state, const ForwardArgs& args) {
  return ForwardPass(state, args).Run();
}

}  // namespace lrmoe::engine
