#include "common/memory_model.h"

#include <limits>

namespace lrmoe {
namespace {

int64_t SaturatingMul(int64_t a, int64_t b) {
  int64_t out;
  return __builtin_mul_overflow(a, b, &out) ? std::numeric_limits<int64_t>::max() / 8 : out;
}

}  // namespace

MemoryCoefficients ComputeMemoryCoefficients(const MemoryModelOptions& options) {
  const int64_t h = options.hidden_size;
  const int64_t f = options.intermediate_size;
  const int64_t a = f * (options.gated ? 2 : 1);
  const int64_t parameters = (a + f) * h;
  const int64_t w = options.weight_bytes;
  constexpr int64_t kScalar = 4;

  MemoryCoefficients out;
  out.owned_expert_bytes = parameters * (w + options.gradient_bytes);
  out.replica_bytes = parameters * (w + options.gradient_bytes);
  out.forward_row_bytes = (h + (options.recompute_activation ? 0 : a) + f) * w + kScalar;
  out.source_pair_bytes = 4 * kScalar + (options.exact_router_gradient ? h * w : 0);
  out.kept_row_bytes = (3 * h + 2 * a + 2 * f) * w + 2 * kScalar;
  out.staged_source_pair_bytes = h * w;
  out.staged_forward_row_bytes = h * w;
  out.staged_moved_row_bytes = out.forward_row_bytes;
  return out;
}

MemoryBytes PredictMemory(const MemoryCoefficients& c, const RankWork& work) {
  MemoryBytes out;
  out.experts = SaturatingMul(work.owned_experts, c.owned_expert_bytes);
  out.replicas = SaturatingMul(work.replicas, c.replica_bytes);
  out.tokens = SaturatingMul(work.forward_rows, c.forward_row_bytes) +
               SaturatingMul(work.source_pairs, c.source_pair_bytes) +
               SaturatingMul(work.kept_rows, c.kept_row_bytes);
  out.staging = SaturatingMul(work.source_pairs, c.staged_source_pair_bytes) +
                SaturatingMul(work.forward_rows, c.staged_forward_row_bytes) +
                SaturatingMul(work.moved_rows, c.staged_moved_row_bytes);
  return out;
}

}  // namespace lrmoe
