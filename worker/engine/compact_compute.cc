// Gradient rows out, the four grouped GEMMs, and dx back.
#include <algorithm>

#include "common/check.h"
#include "common/status_macros.h"
#include "worker/engine/compact.h"
#include "worker/engine/score.h"

namespace lrmoe::engine {

absl::Status CompactPass::PackGradients(const std::byte* dy) {
  const int64_t pairs = context_.num_tokens * state_.shape().top_k;
  LRMOE_ASSIGN_OR_RETURN(payload_out_, state_.rows().Take(pairs * state_.row_bytes(), "gradient payload"));
  state_.device->GatherRows(state_.type(), state_.shape().hidden_size, dy,
                            payload_.token.as<int32_t>().first(payload_.total), payload_out_.data());
  return absl::OkStatus();
}

absl::Status CompactPass::StartDispatch() {
  LRMOE_ASSIGN_OR_RETURN(payload_in_,
                         state_.rows().Take(route_.executor.rows * state_.row_bytes(), "gradient payload"));
  LRMOE_ASSIGN_OR_RETURN(under_way_,
                         exchange_.StartRows("backward dispatch", payload_out_.bytes(), payload_.rows,
                                             payload_in_.bytes(), payload_rows_, state_.row_bytes()));
  return absl::OkStatus();
}

absl::Status CompactPass::FinishDispatch() {
  LRMOE_RETURN_IF_ERROR(exchange_.Finish(under_way_));
  payload_out_.Release();
  const int64_t rows = route_.executor.rows, h = state_.shape().hidden_size;
  LRMOE_ASSIGN_OR_RETURN(gradient_, state_.rows().Take(rows * state_.row_bytes(), "gradient rows"));
  state_.device->GatherRows(state_.type(), h, payload_in_.data(), row_payload_.as<int32_t>(),
                            gradient_.data());
  return absl::OkStatus();
}

std::vector<CompactPass::LocalRows> CompactPass::Locals() const {
  std::vector<LocalRows> out;
  int64_t row = 0;
  for (size_t l = 0; l < context_.route.local.size(); ++l) {
    out.push_back({context_.route.local[l].expert_idx, row, route_.executor.instance_rows[l]});
    row += route_.executor.instance_rows[l];
  }
  return out;
}

// kForward, kInputGradient: a are rows of width k, b (as output) rows of width n, weights at the offset.
// kWeightGradient: a and b are rows of width n and k, the expert's gradient at the offset is added to.
absl::Status CompactPass::Gemm(kernels::GemmKind kind, int64_t n, int64_t k, const std::byte* a,
                               const std::byte* b, int64_t weight_offset) {
  const int64_t bytes = state_.element_bytes();
  std::vector<kernels::GemmGroup> groups;
  for (const LocalRows& local : Locals()) {
    if (local.rows == 0) continue;
    const ExpertInstance* expert = state_.store->Find(context_.plan().invocation.layer, local.expert_idx);
    LRMOE_CHECK(expert != nullptr);
    if (kind == kernels::GemmKind::kWeightGradient) {
      groups.push_back({a + local.first_row * n * bytes, b + local.first_row * k * bytes,
                        expert->gradient + weight_offset, local.rows, expert->gradient_is_zero});
    } else {
      const std::byte* const weights =
          kind == kernels::GemmKind::kForward ? expert->weights : expert->backward_weights;
      groups.push_back({a + local.first_row * k * bytes, weights + weight_offset * bytes,
                        const_cast<std::byte*>(b) + local.first_row * n * bytes, local.rows});
    }
  }
  if (groups.empty()) return absl::OkStatus();
  if (kind != kernels::GemmKind::kWeightGradient && state_.store->packed()) kind = kernels::GemmKind::kPacked;
  return state_.device->GroupedGemm(kind, state_.type(), n, k, groups);
}

absl::Status CompactPass::Recompute() {
  if (!state_.options.recompute_activation) return absl::OkStatus();
  const int64_t width = state_.shape().fc1_width();
  LRMOE_ASSIGN_OR_RETURN(
      a_, state_.rows().Take(route_.executor.rows * width * state_.element_bytes(), "recomputed FC1 rows"));
  return Gemm(kernels::GemmKind::kForward, width, state_.shape().hidden_size, x_.data(), a_.data(), 0);
}

absl::Status CompactPass::Compute() {
  using kernels::GemmKind;
  Arena& arena = state_.rows();
  const LayerShape& shape = state_.shape();
  const int64_t rows = route_.executor.rows, h = shape.hidden_size, f = shape.intermediate_size;
  const int64_t width = shape.fc1_width(), bytes = state_.element_bytes(), w2 = state_.store->w2_offset();
  LRMOE_ASSIGN_OR_RETURN(row_dalpha_, arena.Take(rows * 4, "router gradients"));
  LRMOE_ASSIGN_OR_RETURN(Buffer u, arena.Take(rows * f * bytes, "gradients of activated rows"));
  LRMOE_RETURN_IF_ERROR(Gemm(GemmKind::kInputGradient, f, h, gradient_.data(), u.data(), w2));
  LRMOE_ASSIGN_OR_RETURN(da_, arena.Take(rows * width * bytes, "gradients of FC1 rows"));
  // u becomes alpha * phi, the left factor of dW2.
  state_.device->ActivationBackward(state_.activation(), state_.type(), rows, f, a_.data(), u.data(),
                                    row_alpha_.as<float>().data(), da_.data(), u.data(),
                                    row_dalpha_.as<float>().data());
  a_.Release();
  LRMOE_RETURN_IF_ERROR(Gemm(GemmKind::kWeightGradient, h, f, gradient_.data(), u.data(), w2));
  u.Release();
  return Gemm(GemmKind::kInputGradient, h, width, da_.data(), gradient_.data(),
              0);  // g is done with: dx takes its place
}

absl::Status CompactPass::ComputeLast() {
  LRMOE_RETURN_IF_ERROR(Gemm(kernels::GemmKind::kWeightGradient, state_.shape().fc1_width(),
                             state_.shape().hidden_size, da_.data(), x_.data(), 0));
  for (const LocalRows& local : Locals())
    if (local.rows > 0)
      state_.store->Find(context_.plan().invocation.layer, local.expert_idx)->gradient_is_zero = false;
  x_.Release();
  da_.Release();
  return absl::OkStatus();
}

absl::Status CompactPass::ReturnScalars(std::span<float> dalpha) {
  Arena& arena = state_.rows();
  kernels::Device& device = *state_.device;
  if (context_.execution.rescale == Rescale::kRows) {
    const std::vector<float> factor = RescaleFactors(context_.plan());
    std::vector<kernels::WeightRule> rules;
    for (const LocalRows& local : Locals())
      rules.push_back({{local.first_row, local.rows}, factor[local.expert_idx]});
    kernels::WeighArgs args{rules};
    args.weight = row_dalpha_.as<float>().data();
    device.WeighPairs(args);
  }
  const int64_t sent = Sum(route_.source.send_rows);
  LRMOE_ASSIGN_OR_RETURN(Buffer returned, arena.Take(sent * 4, "router gradients"));
  {
    LRMOE_ASSIGN_OR_RETURN(Buffer out, arena.Take(route_.executor.rows * 4, "router gradients"));
    std::vector<kernels::Stretch> stretches;
    stretches.reserve(route_.executor.segments.size());
    for (const Segment& segment : route_.executor.segments)
      stretches.push_back({segment.row, segment.position, segment.count});
    device.CopyStretches(stretches, row_dalpha_.data(), out.data());
    row_dalpha_.Release();
    LRMOE_RETURN_IF_ERROR(exchange_.Rows("backward router gradients", out.bytes(), route_.executor.recv_rows,
                                         returned.bytes(), route_.source.send_rows, 4));
  }
  LRMOE_ASSIGN_OR_RETURN(Buffer by_pair,
                         arena.Take(static_cast<int64_t>(dalpha.size_bytes()), "router gradients"));
  device.Fill(by_pair.data(), 0, by_pair.size());
  device.ScatterWords(sent, route_.sent_pair.as<int32_t>().data(), returned.data(), by_pair.data());
  device.Download(dalpha.data(), by_pair.data(), by_pair.size());
  return absl::OkStatus();
}

absl::Status CompactPass::StartReturn() {
  Arena& arena = state_.rows();
  const int64_t h = state_.shape().hidden_size, rows = route_.executor.rows;
  const int64_t pairs = context_.num_tokens * state_.shape().top_k;
  {  // Executor: the compact rows of each payload row, which all come from one source, in its send order.
    const int64_t payload_rows = Sum(payload_rows_);
    LRMOE_ASSIGN_OR_RETURN(Buffer offset, arena.Take((payload_rows + 2) * 8, "return sums"));
    LRMOE_ASSIGN_OR_RETURN(Buffer index, arena.Take(rows * 4, "return sums"));
    state_.device->GroupByKey(rows, row_payload_.as<int32_t>().data(), payload_rows,
                              offset.as<int64_t>().data(), index.as<int32_t>().data());
    state_.device->SumRows(state_.type(), h, gradient_.data(), index.as<int32_t>(),
                           offset.as<int64_t>().first(payload_rows + 1), payload_in_.data());
  }
  gradient_.Release();
  LRMOE_ASSIGN_OR_RETURN(returned_, state_.rows().Take(pairs * state_.row_bytes(), "returned gradients"));
  LRMOE_ASSIGN_OR_RETURN(under_way_,
                         exchange_.StartRows("backward return", payload_in_.bytes(), payload_rows_,
                                             returned_.bytes(), payload_.rows, state_.row_bytes()));
  return absl::OkStatus();
}

absl::Status CompactPass::FinishReturn(std::span<std::byte> dx) {
  LRMOE_RETURN_IF_ERROR(exchange_.Finish(under_way_));
  payload_in_.Release();
  // Source: payload rows are by (rank, token), so each token's rows are listed in rank order.
  LRMOE_ASSIGN_OR_RETURN(Buffer offset, state_.rows().Take((context_.num_tokens + 2) * 8, "return sums"));
  LRMOE_ASSIGN_OR_RETURN(Buffer index, state_.rows().Take(payload_.total * 4, "return sums"));
  state_.device->GroupByKey(payload_.total, payload_.token.as<int32_t>().data(), context_.num_tokens,
                            offset.as<int64_t>().data(), index.as<int32_t>().data());
  Buffer copy;
  LRMOE_ASSIGN_OR_RETURN(std::byte* const sum, state_.ForDevice(dx, copy));
  state_.device->SumRows(state_.type(), state_.shape().hidden_size, returned_.data(), index.as<int32_t>(),
                         offset.as<int64_t>().first(context_.num_tokens + 1), sum);
  returned_.Release();  // before the gradients of replicas leave
  state_.Deliver(dx, copy);
  return absl::OkStatus();
}

}  // namespace lrmoe::engine
