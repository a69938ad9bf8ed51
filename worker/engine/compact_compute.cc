// Gradient rows out, the four grouped GEMMs, and dx back.
#include <algorithm>
#include <cstring>
#include <numeric>

#include "common/check.h"
#include "common/status_macros.h"
#include "worker/engine/compact.h"

namespace lrmoe::engine {

absl::Status CompactPass::PackGradients(const std::byte* dy) {
  const int64_t pairs = static_cast<int64_t>(context_.pair_instance.as<int32_t>().size());
  LRMOE_ASSIGN_OR_RETURN(payload_out_, state_.rows().Take(pairs * state_.row_bytes(), "gradient payload"));
  state_.device->GatherRows(state_.type(), state_.shape().hidden_size, dy,
                            token_.as<int32_t>().first(payload_.total), payload_out_.data());
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
  LRMOE_ASSIGN_OR_RETURN(row_dalpha_, state_.arena->Take(rows * 4, "router gradients"));
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

absl::Status CompactPass::ReturnScalars(const Buffer& returned) {
  LRMOE_ASSIGN_OR_RETURN(Buffer out, state_.arena->Take(route_.executor.rows * 4, "router gradients"));
  LRMOE_RETURN_IF_ERROR(state_.device->Wait());
  for (const Segment& segment : route_.executor.segments)
    std::copy_n(row_dalpha_.as<float>().begin() + segment.row, segment.count,
                out.as<float>().begin() + segment.position);
  return exchange_.Rows("backward router gradients", out.bytes(), route_.executor.recv_rows, returned.bytes(),
                        route_.source.send_rows, 4);
}

absl::Status CompactPass::StartReturn() {
  Arena& arena = *state_.arena;
  const int64_t h = state_.shape().hidden_size;
  const int64_t pairs = static_cast<int64_t>(context_.pair_instance.as<int32_t>().size());
  {  // Executor: the compact rows of each payload row, in receive order.
    LRMOE_ASSIGN_OR_RETURN(Buffer offsets, arena.Take((Sum(payload_rows_) + 2) * 8, "return sums"));
    LRMOE_ASSIGN_OR_RETURN(Buffer index, arena.Take(route_.executor.rows * 4, "return sums"));
    // Segments of one source by position: receive order. Rows of one token come from one source.
    std::vector<const Segment*> by_position;
    for (const Segment& segment : route_.executor.segments) by_position.push_back(&segment);
    std::sort(by_position.begin(), by_position.end(),
              [](const Segment* a, const Segment* b) { return a->position < b->position; });
    const auto rows = [&](const auto& use) {
      for (const Segment* segment : by_position)
        for (int64_t row = segment->row; row < segment->row + segment->count; ++row)
          use(row, row_payload_.as<int32_t>()[row]);
    };
    const auto offset = GroupByKey(rows, offsets.as<int64_t>(), index.as<int32_t>());
    state_.device->SumRows(state_.type(), h, gradient_.data(), index.as<int32_t>(), offset,
                           payload_in_.data());
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
  // Source: payload rows are by (rank, token), so a stable sort by token leaves each token's rows in rank
  // order.
  const auto token = token_.as<int32_t>().first(payload_.total);
  LRMOE_ASSIGN_OR_RETURN(Buffer offsets, state_.arena->Take((context_.num_tokens + 2) * 8, "return sums"));
  LRMOE_ASSIGN_OR_RETURN(Buffer index, state_.arena->Take(payload_.total * 4, "return sums"));
  const auto rows = [&](const auto& use) {
    for (int64_t row = 0; row < payload_.total; ++row) use(row, token[row]);
  };
  const auto offset = GroupByKey(rows, offsets.as<int64_t>(), index.as<int32_t>());
  Buffer copy;
  LRMOE_ASSIGN_OR_RETURN(std::byte* const sum, state_.ForDevice(dx, copy));
  state_.device->SumRows(state_.type(), state_.shape().hidden_size, returned_.data(), index.as<int32_t>(),
                         offset, sum);
  returned_.Release();  // before the gradients of replicas leave
  state_.Deliver(dx, copy);
  return absl::OkStatus();
}

}  // namespace lrmoe::engine
