// The engine's passes as CUDA kernels. Pointers are device memory; shapes come from the host plan; every call
// only enqueues on `stream` (a cudaStream_t) and never synchronises. Meaning, shapes and rounding are those
// of kernels::Device (kernels/kernels.h). What works per pair is in pair_passes.h.
//
// Deterministic: a row is summed by one warp in a fixed order; no floating-point atomics. Rows whose address
// and length are multiples of 16 bytes are moved by 128-bit accesses, others element by element. Errors:
// Internal with the CUDA error's name when a launch fails; InvalidArgument for negative sizes.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/kernels.h"

namespace lrmoe::kernels::cuda {

using Stream = void*;

absl::Status ActivationForward(Stream stream, ExpertActivation activation, Type type, int64_t rows, int64_t f,
                               const void* a, void* phi, float* norm2);

struct ActivationBackwardArgs {
  ExpertActivation activation = ExpertActivation::kSwiGlu;
  Type type = Type::kBf16;
  int64_t rows = 0, f = 0;
  const void* a = nullptr;       // [rows, f or 2f]
  const void* u = nullptr;       // [rows, f]
  const float* alpha = nullptr;  // [rows]
  void* da = nullptr;            // [rows, f or 2f]
  void* phi_alpha = nullptr;     // [rows, f]; may alias u
  float* dalpha = nullptr;       // [rows]
};
absl::Status ActivationBackward(Stream stream, const ActivationBackwardArgs& args);

// Rows of `width` elements. Index, offset and position arrays lie in device memory.
absl::Status GatherRows(Stream stream, Type type, int64_t width, const void* src, const int32_t* index,
                        int64_t num_rows, void* dst);
struct CombineRowsArgs {
  Type type = Type::kBf16;
  int64_t width = 0, num_tokens = 0;
  int32_t k = 0;
  const void* y = nullptr;
  const int32_t* position = nullptr;  // [num_tokens, k]; negative: skipped
  const float* alpha = nullptr;       // [num_tokens, k]
  void* out = nullptr;                // [num_tokens, width]
};
absl::Status CombineRows(Stream stream, const CombineRowsArgs& args);
struct SumRowsArgs {
  Type type = Type::kBf16;
  int64_t width = 0, num_rows = 0;
  const void* src = nullptr;
  const int32_t* index = nullptr;
  const int64_t* offset = nullptr;  // [num_rows + 1]
  void* dst = nullptr;              // [num_rows, width]
};
absl::Status SumRows(Stream stream, const SumRowsArgs& args);
// Columns [first_column, first_column + num_columns) of rows[num_rows, width] of 16-bit elements: those of
// row i move to row to[i], a permutation. scratch[num_rows, num_columns].
struct PermuteColumnsArgs {
  int64_t width = 0, first_column = 0, num_columns = 0, num_rows = 0;
  const int32_t* to = nullptr;
  void* rows = nullptr;
  void* scratch = nullptr;
};
absl::Status PermuteColumns(Stream stream, const PermuteColumnsArgs& args);
absl::Status RowNorm2(Stream stream, Type type, int64_t rows, int64_t width, const void* src, float* out);
absl::Status RowAbsSum(Stream stream, Type type, int64_t rows, int64_t width, const void* src, float* out);
struct RowDotArgs {
  Type type = Type::kBf16;
  int64_t width = 0, num_rows = 0;
  const void* a = nullptr;
  const int32_t* a_row = nullptr;
  const void* b = nullptr;
  const int32_t* b_row = nullptr;
  float* out = nullptr;
};
absl::Status RowDot(Stream stream, const RowDotArgs& args);

struct AdamWArgs {
  Device::AdamWStep step;
  int64_t n = 0;
  float* master = nullptr;
  float* m = nullptr;
  float* v = nullptr;
  const float* gradient = nullptr;
  Type type = Type::kBf16;
  void* weights = nullptr;
};
absl::Status AdamW(Stream stream, const AdamWArgs& args);

// out[0] = sum of squares in fp64; `partial` is scratch for kPartialSums doubles (launch.h).
absl::Status SquaredNorm(Stream stream, int64_t n, const float* values, double* partial, double* out);
absl::Status AddInPlace(Stream stream, int64_t n, float* dst, const float* src);
absl::Status Fp32ToBf16(Stream stream, int64_t n, const float* src, Bf16* dst);
absl::Status Bf16ToFp32(Stream stream, int64_t n, const Bf16* src, float* dst);

}  // namespace lrmoe::kernels::cuda
