#include "kernels/cuda/gemm_shape.h"

#include <algorithm>
#include <numeric>

namespace lrmoe::kernels::cuda {
namespace {

// Below so many rows per group, with at least so many groups, starting a GEMM costs more than computing it,
// and one grouped call starts once. Published times (H100, 128 groups) have the grouped call behind a loop
// from 512 rows on; these bounds are a guess below that until the bench of tests/gpu has measured both.
constexpr int64_t kGroupedBelowRows = 64;
constexpr size_t kGroupedFromGroups = 16;

bool Aligned(std::span<const GemmGroup> groups) {
  return std::all_of(groups.begin(), groups.end(), [](const GemmGroup& group) {
    return (reinterpret_cast<uintptr_t>(group.a) | reinterpret_cast<uintptr_t>(group.b) |
            reinterpret_cast<uintptr_t>(group.c)) %
               16 ==
           0;
  });
}

}  // namespace

BlasShape ToColumnMajor(GemmKind kind, int64_t n, int64_t k, int64_t rows, bool overwrite) {
  BlasShape shape;
  switch (kind) {
    case GemmKind::kForward:  // C^T[n, rows] = B[n, k] . A^T[k, rows]
      shape = {.transpose_a = true, .m = n, .n = rows, .k = k, .lda = k, .ldb = k, .ldc = n};
      break;
    case GemmKind::kInputGradient:  // C^T[n, rows] = B^T[n, k] . A^T[k, rows]
      shape = {.m = n, .n = rows, .k = k, .lda = n, .ldb = k, .ldc = n};
      break;
    case GemmKind::kWeightGradient:  // C^T[k, n] += B^T[k, rows] . A[rows, n]
      shape = {.transpose_b = true, .m = k, .n = n, .k = rows, .lda = k, .ldb = n, .ldc = k};
      shape.beta = overwrite ? 0 : 1;
      break;
    case GemmKind::kPacked:  // of devices that pack weights; this one takes them as they are
      break;
  }
  return shape;
}

GemmPath ChooseGemmPath(GemmPathRule rule, GemmKind kind, Type type, std::span<const GemmGroup> groups) {
  if (rule == GemmPathRule::kStreams || !GroupedIsPossible(kind, type)) return GemmPath::kStreams;
  if (type == Type::kBf16 && !Aligned(groups)) return GemmPath::kStreams;
  if (rule == GemmPathRule::kGrouped) return GemmPath::kGrouped;
  int64_t rows = 0;
  for (const GemmGroup& group : groups) rows += group.rows;
  const bool small =
      groups.size() >= kGroupedFromGroups && rows < kGroupedBelowRows * static_cast<int64_t>(groups.size());
  return small ? GemmPath::kGrouped : GemmPath::kStreams;
}

std::vector<int32_t> SpreadOverStreams(std::span<const GemmGroup> groups, int32_t num_streams) {
  std::vector<size_t> order(groups.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return groups[a].rows > groups[b].rows; });
  std::vector<int64_t> load(num_streams, 0);
  std::vector<int32_t> stream(groups.size());
  for (size_t group : order) {
    const auto least = std::min_element(load.begin(), load.end());
    stream[group] = static_cast<int32_t>(least - load.begin());
    *least += groups[group].rows;
  }
  return stream;
}

}  // namespace lrmoe::kernels::cuda
