// Device API of the expert maths. Knows rows, widths and pointers; knows nothing of plans, ranks or
// invocations. Row-major, contiguous rows. `Type` is the compute type of activations and weights; gradients,
// scores, norms, alphas and master weights are fp32. Every operation is deterministic: same inputs and thread
// count, same bits.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "kernels/memory.h"
#include "kernels/pairs.h"

namespace lrmoe::kernels {

enum class Type : uint8_t { kBf16 = 1, kFp32 = 2 };
inline int64_t SizeOf(Type type) {
  return type == Type::kBf16 ? 2 : 4;
}
using Bf16 = uint16_t;  // bit pattern; conversion rounds to nearest even

enum class ExpertActivation : uint8_t { kSwiGlu = 1, kSilu = 2, kGelu = 3 };  // kGelu: exact, erf form

// One expert's part of a grouped GEMM. Zero rows: skipped, c untouched.
struct GemmGroup {
  const void* a = nullptr;
  const void* b = nullptr;
  void* c = nullptr;
  int64_t rows = 0;
  bool overwrite = false;  // kWeightGradient: C is written, not added to
};

enum class GemmKind : uint8_t {
  kForward,         // C[rows, n] = A[rows, k] . B[n, k]^T          (FC1, FC2); A, B, C of type
  kInputGradient,   // C[rows, n] = A[rows, k] . B[k, n]            (dphi, dx); A, B, C of type
  kWeightGradient,  // C[n, k] += A[rows, n]^T . B[rows, k]         (dW); A, B of type, C fp32; see overwrite
  kPacked,          // C[rows, n] = A[rows, k] . B; B packed by PackWeights for n and k; A, B, C of type
};

class Interprocess;  // interprocess.h

// A matrix of weights can be packed when both its sizes are multiples of this.
inline constexpr int64_t kPackedMultiple = 64;

// A device works through its operations in the order of the calls. All arrays lie in its memory: rows,
// weights, gradients, optimizer state, and what there is one of per row or pair (indices, offsets, positions,
// alphas, norms, dots), also where a span says how long they are. The host's are only what pairs.h says and
// the host's side of Upload and Download. The CPU device shares the host's memory and is done when a call
// returns. Not thread-safe, but a thread that waits may leave the calls to another one.
class Device : public PairOperations {
 public:
  // Whether the memory at `pointer` is this device's.
  virtual bool Holds(const void* /*pointer*/) const { return true; }
  virtual int64_t memory_bytes() const { return INT64_MAX; }  // all there is of it; INT64_MAX: not known
  // What it shares with other processes on the same device; lives as long as the device. Null: nothing.
  virtual Interprocess* interprocess() { return nullptr; }
  virtual absl::StatusOr<std::unique_ptr<Memory>> Reserve(int64_t bytes);
  // Host memory that Upload and Download reach without a detour, all of it usable at once. ResourceExhausted.
  virtual absl::StatusOr<std::unique_ptr<Memory>> AllocatePinned(int64_t bytes);
  // Host to device, device to host, within the device. Host memory stays as it is and valid until Wait.
  virtual void Upload(void* dst, const void* src, int64_t bytes);
  virtual void Download(void* dst, const void* src, int64_t bytes);
  virtual void Copy(void* dst, const void* src, int64_t bytes);
  virtual void Fill(void* dst, uint8_t value, int64_t bytes);
  // Row i of rows[to.size()] moves to place to[i]; `to` is a permutation, its contents are used up.
  virtual void PermuteRows(int64_t row_bytes, std::span<int32_t> to, void* rows);
  // Until everything called so far is done. The first error of any of it; the device is of no use after one.
  virtual absl::Status Wait() { return absl::OkStatus(); }

  // How GEMMs are computed on this machine, in words for the log: decided once, at creation.
  virtual absl::string_view gemm_path() const = 0;

  // Variable-size grouped GEMM without padding; bf16 accumulates in fp32. n, k as in GemmKind.
  virtual absl::Status GroupedGemm(GemmKind kind, Type type, int64_t n, int64_t k,
                                   std::span<const GemmGroup> groups) = 0;

  // Whether weights of the type are multiplied faster in a form of this device's own (kPacked): one form per
  // direction, as large as the plain matrix. Where not, PackWeights and its like must not be called.
  virtual bool PacksWeights(Type /*type*/) const { return false; }
  // B as kForward (plain[n, k]) or kInputGradient (plain[k, n]) take it, packed for the same product. n and k
  // are multiples of kPackedMultiple.
  virtual void PackWeights(GemmKind kind, Type type, int64_t n, int64_t k, const void* plain, void* packed);
  // The plain matrix [n, k] of what was packed for kForward.
  virtual void UnpackWeights(Type type, int64_t n, int64_t k, const void* forward, void* plain);
  // What was packed for kForward with n and k, packed for kInputGradient with k and n.
  virtual void RepackWeights(Type type, int64_t n, int64_t k, const void* forward, void* input_gradient);

  // phi[rows, f] from a[rows, f or 2f] and norm2[row] = ||phi||^2 of the stored (rounded) phi, in one pass.
  virtual void ActivationForward(ExpertActivation activation, Type type, int64_t rows, int64_t f,
                                 const void* a, void* phi, float* norm2) = 0;

  // From u[rows, f] = g W2 (gradient at phi before alpha), a and alpha[rows]:
  //   da[rows, f or 2f] = alpha * activation'(a, u);  phi_alpha[rows, f] = alpha * phi(a), the left factor of
  //   dW2; dalpha[row] = u . phi(a) (= g . y_u, engine design "Router gradient"). phi is recomputed from a in
  //   fp32.
  // da may alias nothing; phi_alpha may alias u.
  virtual void ActivationBackward(ExpertActivation activation, Type type, int64_t rows, int64_t f,
                                  const void* a, const void* u, const float* alpha, void* da, void* phi_alpha,
                                  float* dalpha) = 0;

  // dst[i] = src[index[i]] for rows of `width` elements.
  virtual void GatherRows(Type type, int64_t width, const void* src, std::span<const int32_t> index,
                          void* dst) = 0;

  // out[t] = sum over j of alpha[t*k + j] * y[position[t*k + j]], fp32 accumulation in slot order; position <
  // 0: skipped. out[num_tokens, width].
  virtual void CombineRows(Type type, int64_t width, int64_t num_tokens, int32_t k, const void* y,
                           const int32_t* position, const float* alpha, void* out) = 0;

  // Segmented sum: dst[i] = sum of src[index[j]] for j in [offset[i], offset[i+1]), fp32 accumulation in that
  // order, rounded once. dst has offset.size() - 1 rows; an empty segment gives a zero row. Serves the
  // per-token sum of dx at the executor and the final scatter-add at the source.
  virtual void SumRows(Type type, int64_t width, const void* src, std::span<const int32_t> index,
                       std::span<const int64_t> offset, void* dst) = 0;

  // out[i] = ||src[i]||^2 and out[i] = sum |src[i]|, fp32.
  virtual void RowNorm2(Type type, int64_t rows, int64_t width, const void* src, float* out) = 0;
  virtual void RowAbsSum(Type type, int64_t rows, int64_t width, const void* src, float* out) = 0;

  // out[i] = a[a_row[i]] . b[b_row[i]], fp32.
  virtual void RowDot(Type type, int64_t width, const void* a, std::span<const int32_t> a_row, const void* b,
                      std::span<const int32_t> b_row, float* out) = 0;

  // AdamW with decoupled weight decay on n fp32 master weights; gradient is scaled by gradient_scale first.
  // Writes the new weights in `type` as well. Same order of operations as torch.optim.AdamW (single tensor,
  // no amsgrad), each rounded in turn: the same bits on every device.
  struct AdamWStep {
    int64_t step = 1;  // 1-based, for bias correction
    double lr = 1e-3, beta1 = 0.9, beta2 = 0.999, eps = 1e-8, weight_decay = 0.01, gradient_scale = 1.0;
  };
  virtual void AdamW(const AdamWStep& step, int64_t n, float* master, float* m, float* v,
                     const float* gradient, Type type, void* weights) = 0;

  // Sum of squares in fp64, fixed order.
  virtual double SquaredNorm(int64_t n, const float* values) = 0;
  // dst += src
  virtual void AddInPlace(int64_t n, float* dst, const float* src) = 0;

  virtual void Fp32ToBf16(int64_t n, const float* src, Bf16* dst) = 0;
  virtual void Bf16ToFp32(int64_t n, const Bf16* src, float* dst) = 0;
};

// Packed GEMMs, vectorised passes, `num_threads` threads of its own, shared by all operations.
// InvalidArgument when num_threads is not 1..256; ResourceExhausted when they cannot be started.
absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(int num_threads);
// Device::PacksWeights of any CPU device on this machine.
bool CpuPacksWeights(Type type);

}  // namespace lrmoe::kernels
