#include "common/memory_model.h"

#include <algorithm>
#include <limits>

namespace lrmoe {
namespace {

// Sums of up to seven saturated products stay below the largest int64_t.
constexpr int64_t kSaturated = std::numeric_limits<int64_t>::max() / 8;

int64_t SaturatingMul(int64_t a, int64_t b) {
  int64_t out;
  return __builtin_mul_overflow(a, b, &out) ? kSaturated : std::min(out, kSaturated);
}

int64_t StageBytes(const MemoryCoefficients& c, int stage, const RankWork& work) {
  const MemoryStage& s = c.stages[stage];
  int64_t bytes = SaturatingMul(work.source_pairs, s.source_pair) +
                  SaturatingMul(work.forward_rows, s.forward_row) + SaturatingMul(work.kept_rows, s.kept_row);
  if (stage == c.compaction_stage) {
    bytes += std::min(kExchangeStagingBytes, SaturatingMul(work.moved_rows, c.staged_moved_row_bytes));
    bytes += std::min(kExchangeStagingBytes, SaturatingMul(work.received_rows, c.staged_moved_row_bytes));
  }
  return bytes;
}

// Replica weights or gradients in transit, each direction at most the staging buffer.
int64_t InTransit(const RankWork& work, int64_t expert_bytes) {
  return std::min(kExchangeStagingBytes, SaturatingMul(work.replicas, expert_bytes)) +
         std::min(kExchangeStagingBytes, SaturatingMul(work.exported_replicas, expert_bytes));
}

// Largest n for which `fixed` plus n * forward_per_row forward and n * kept_per_row kept rows fits in every
// stage.
int64_t MostRows(const MemoryCoefficients& c, const RankWork& fixed, int64_t available,
                 double forward_per_row, double kept_per_row) {
  available -= SaturatingMul(fixed.owned_experts, c.owned_expert_bytes);
  available -= SaturatingMul(fixed.replicas, c.replica_bytes);
  double rows = 0x1.0p62;
  for (int stage = 0; stage < MemoryCoefficients::kNumStages; ++stage) {
    const double left = static_cast<double>(available - StageBytes(c, stage, fixed));
    if (left < 0) return 0;
    const double bytes = forward_per_row * static_cast<double>(c.stages[stage].forward_row) +
                         kept_per_row * static_cast<double>(c.stages[stage].kept_row);
    if (bytes <= 0) continue;
    rows = std::min(rows, left / bytes);
  }
  return static_cast<int64_t>(rows);
}

}  // namespace

MemoryModelOptions MemoryModelOf(const LayerShape& shape) {
  MemoryModelOptions options;
  options.hidden_size = shape.hidden_size;
  options.intermediate_size = shape.intermediate_size;
  options.gated = shape.gated;
  options.weight_bytes = SizeInBytes(shape.dtype);
  return options;
}

int64_t NumWeightForms(const MemoryModelOptions& options) {
  const bool whole =
      options.hidden_size % kPackedMultiple == 0 && options.intermediate_size % kPackedMultiple == 0;
  return options.packs_weights && whole ? 2 : 1;
}

MemoryCoefficients ComputeMemoryCoefficients(const MemoryModelOptions& options) {
  const int64_t w = options.weight_bytes;
  const int64_t h = options.hidden_size * w;
  const int64_t f = options.intermediate_size * w;
  const int64_t a = f * (options.gated ? 2 : 1);
  const int64_t saved_a = options.recompute_activation ? 0 : a;
  const int64_t y = options.exact_router_gradient ? h : 0;
  const int64_t parameters = (a + f) / w * options.hidden_size;

  MemoryCoefficients out;
  out.replica_bytes = parameters * (w * NumWeightForms(options) + options.gradient_bytes);
  out.owned_expert_bytes =
      out.replica_bytes + (options.optimizer_on_device ? parameters * kOptimizerBytesPerParameter : 0);
  out.forward_row_bytes = h + saved_a;
  out.source_pair_bytes = 12 + y;
  out.row_bytes = h;
  out.staged_moved_row_bytes = h + saved_a;
  const int64_t blocks = (parameters + kExchangeBlockElements - 1) / kExchangeBlockElements;
  out.staged_weights_bytes = blocks * kExchangeBlockElements * w;
  out.staged_gradient_bytes = blocks * kExchangeBlockElements * 4;
  // Numbers without a width are index and scalar arrays: 4 bytes each, 1 for the kept marks.
  out.stages = {{
      {std::max<int64_t>(24, 8 + h), 2 * h + 4, 0},  // dispatch: index, then payloads out and in, x
      {4, 2 * h + 8, 0},                             // dispatch: payload in, x
      {4, h + a + f + 4, 0},                         // activation: x, a, phi
      {4, h + saved_a + f + h + 4, 0},               // FC2: x, a, phi, y
      {4 + h, h + saved_a + h + 4, 0},               // return: x, a, y; y at the source
      {4 + h, h + saved_a + 8, 0},                   // norms
      {12 + h, h + saved_a, 0},                      // combine
      {20 + y, h + saved_a, 0},                      // router gradient, scores
      {30, h + saved_a, 0},                          // row descriptions out
      {8, h + saved_a + 5, 16},                      // row descriptions in
      {8, h + saved_a + 4, h + saved_a + 12},        // compaction: saved and compact rows
      {8 + h, 0, 2 * h + a + 8},                     // gradient dispatch: payloads, x, a
      {8, 0, 3 * h + 2 * a + f + 12},                // GEMMs: payload, g, x, a, dphi, da
      {16, 0, 3 * h + a + 16},                       // router gradients back: payload, dx, x, da
      {8 + h, 0, 2 * h + a + 12},                    // gradient return: payloads; x, da
      {20 + h, 0, 12},                               // sums of returned gradients
  }};
  out.compaction_stage = 10;
  out.kept_row_bytes = out.stages[12].kept_row;
  return out;
}

MemoryBytes PredictMemory(const MemoryCoefficients& c, const RankWork& work) {
  MemoryBytes out;
  out.experts = SaturatingMul(work.owned_experts, c.owned_expert_bytes);
  out.replicas = SaturatingMul(work.replicas, c.replica_bytes);
  out.tokens = SaturatingMul(work.forward_rows, c.forward_row_bytes) +
               SaturatingMul(work.source_pairs, c.source_pair_bytes);
  int64_t largest = 0;
  for (int stage = 0; stage < MemoryCoefficients::kNumStages; ++stage)
    largest = std::max(largest, StageBytes(c, stage, work));
  // Replica weights come in when only pairs and x are there, gradients leave when only scalars are.
  largest =
      std::max(largest, SaturatingMul(work.source_pairs, 8) + SaturatingMul(work.forward_rows, c.row_bytes) +
                            InTransit(work, c.staged_weights_bytes));
  largest = std::max(largest, SaturatingMul(work.source_pairs, 8) + SaturatingMul(work.kept_rows, 12) +
                                  InTransit(work, c.staged_gradient_bytes));
  // Selection: an owner holds the scores of its experts, those of one of them once more.
  largest = std::max(
      largest, SaturatingMul(work.source_pairs, 21) + SaturatingMul(work.forward_rows, c.forward_row_bytes) +
                   SaturatingMul(work.scored_pairs, 4) + SaturatingMul(work.most_scored_pairs, 4));
  out.staging = std::max<int64_t>(0, largest - out.tokens);
  return out;
}

int64_t MaxForwardRows(const MemoryCoefficients& c, const RankWork& work, double rate,
                       int64_t available_bytes) {
  RankWork fixed = work;
  fixed.forward_rows = fixed.kept_rows = 0;
  return MostRows(c, fixed, available_bytes, 1, rate);
}

int64_t MaxKeptRows(const MemoryCoefficients& c, const RankWork& work, int64_t available_bytes) {
  RankWork fixed = work;
  fixed.kept_rows = 0;
  return MostRows(c, fixed, available_bytes, 0, 1);
}

}  // namespace lrmoe
