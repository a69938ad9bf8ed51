// Grouped GEMM for cuBLAS, the part that is arithmetic: how our row-major products are said in column-major
// terms, which of the two ways computes them, and how groups are spread over streams.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "kernels/kernels.h"

namespace lrmoe::kernels::cuda {

// One cublasGemmEx: C[m, n] = op(A)[m, k] . op(B)[k, n] + beta C, column-major.
struct BlasShape {
  bool transpose_a = false, transpose_b = false;
  int64_t m = 0, n = 0, k = 0;
  int64_t lda = 1, ldb = 1, ldc = 1;
  float beta = 0;
};

// Our C row-major is C^T column-major, so the operands change places: the BLAS A is our b, its B our a. n, k
// and rows as in GemmKind, all > 0; overwrite as in GemmGroup.
BlasShape ToColumnMajor(GemmKind kind, int64_t n, int64_t k, int64_t rows, bool overwrite = false);

enum class GemmPath : uint8_t {
  kStreams,  // one GEMM per group, spread over several streams
  kGrouped,  // one cublasGemmGroupedBatchedEx
};
enum class GemmPathRule : uint8_t { kByTable, kStreams, kGrouped };

// cublasGemmGroupedBatchedEx has no bf16 operands with an fp32 result, which weight gradients need.
constexpr bool GroupedIsPossible(GemmKind kind, Type type) {
  return kind != GemmKind::kWeightGradient || type == Type::kFp32;
}
// kGrouped in a rule only where it is possible. The grouped call's 16-bit operands are to be aligned to 16
// bytes (cuBLAS asks for less where k is odd): rows of odd widths go over streams.
GemmPath ChooseGemmPath(GemmPathRule rule, GemmKind kind, Type type, std::span<const GemmGroup> groups);

// Stream of each group: the largest first, each to the stream with the fewest rows so far, ties to the
// lowest. Depends on the row counts only. num_streams >= 1.
std::vector<int32_t> SpreadOverStreams(std::span<const GemmGroup> groups, int32_t num_streams);

}  // namespace lrmoe::kernels::cuda
