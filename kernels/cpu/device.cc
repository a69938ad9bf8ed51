#include "kernels/cpu/device.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <exception>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cpu/gemm.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kernels.h"
#include "kernels/precondition.h"

namespace lrmoe::kernels {
namespace cpu {
namespace {

// Elements per task. Waking a sleeping thread costs some 20 us; this many elements of the cheapest pass take
// about that long, so smaller passes run on the calling thread.
constexpr int64_t kElementsPerTask = 32768;

class CpuDevice : public Device {
 public:
  CpuDevice(int num_threads, const Passes& passes, Bf16Path bf16_path)
      : passes_(passes), pool_(num_threads), gemm_(&pool_, &passes_, bf16_path) {}

  absl::string_view gemm_path() const override { return gemm_.path(); }

  absl::Status GroupedGemm(GemmKind kind, Type type, int64_t n, int64_t k,
                           std::span<const GemmGroup> groups) override {
    return gemm_.Run(kind, type, n, k, groups);
  }

  bool PacksWeights(Type type) const override { return gemm_.PacksWeights(type); }
  void PackWeights(GemmKind kind, Type type, int64_t n, int64_t k, const void* plain, void* packed) override {
    gemm_.PackWeights(kind, type, n, k, plain, packed);
  }
  void UnpackWeights(Type type, int64_t n, int64_t k, const void* forward, void* plain) override {
    gemm_.UnpackWeights(type, n, k, forward, plain);
  }
  void RepackWeights(Type type, int64_t n, int64_t k, const void* forward, void* input_gradient) override {
    gemm_.RepackWeights(type, n, k, forward, input_gradient);
  }

  void ActivationForward(ExpertActivation activation, Type type, int64_t rows, int64_t f, const void* a,
                         void* phi, float* norm2) override {
    const ActivationForwardArgs args{activation, type, f, a, phi, norm2};
    ForRows(rows, f, [&](int64_t begin, int64_t end) { passes_.activation_forward(args, begin, end); });
  }

  void ActivationBackward(ExpertActivation activation, Type type, int64_t rows, int64_t f, const void* a,
                          const void* u, const float* alpha, void* da, void* phi_alpha,
                          float* dalpha) override {
    const ActivationBackwardArgs args{activation, type, f, a, u, alpha, da, phi_alpha, dalpha};
    ForRows(rows, f, [&](int64_t begin, int64_t end) { passes_.activation_backward(args, begin, end); });
  }

  void GatherRows(Type type, int64_t width, const void* src, std::span<const int32_t> index,
                  void* dst) override {
    const int64_t row_bytes = width * SizeOf(type);
    ForRows(static_cast<int64_t>(index.size()), width, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        std::memcpy(static_cast<char*>(dst) + i * row_bytes,
                    static_cast<const char*>(src) + index[i] * row_bytes, row_bytes);
      }
    });
  }

  void CombineRows(Type type, int64_t width, int64_t num_tokens, int32_t k, const void* y,
                   const int32_t* position, const float* alpha, void* out) override {
    const CombineArgs args{type, width, k, y, position, alpha, out};
    ForRows(num_tokens, width * std::max(k, 1),
            [&](int64_t begin, int64_t end) { passes_.combine(args, begin, end); });
  }

  void SumRows(Type type, int64_t width, const void* src, std::span<const int32_t> index,
               std::span<const int64_t> offset, void* dst) override {
    LRMOE_KERNELS_REQUIRE(!offset.empty());
    LRMOE_KERNELS_REQUIRE(offset.front() >= 0 && offset.back() <= static_cast<int64_t>(index.size()));
    const SumArgs args{type, width, src, index.data(), offset.data(), dst};
    const int64_t rows = static_cast<int64_t>(offset.size()) - 1;
    const int64_t terms_per_row = rows == 0 ? 1 : 1 + (offset.back() - offset.front()) / rows;
    ForRows(rows, width * terms_per_row, [&](int64_t begin, int64_t end) { passes_.sum(args, begin, end); });
  }

  void RowNorm2(Type type, int64_t rows, int64_t width, const void* src, float* out) override {
    const RowReduceArgs args{type, width, src, out};
    ForRows(rows, width, [&](int64_t begin, int64_t end) { passes_.norm2(args, begin, end); });
  }

  void RowAbsSum(Type type, int64_t rows, int64_t width, const void* src, float* out) override {
    const RowReduceArgs args{type, width, src, out};
    ForRows(rows, width, [&](int64_t begin, int64_t end) { passes_.abs_sum(args, begin, end); });
  }

  void RowDot(Type type, int64_t width, const void* a, std::span<const int32_t> a_row, const void* b,
              std::span<const int32_t> b_row, float* out) override {
    LRMOE_KERNELS_REQUIRE(a_row.size() == b_row.size());
    const RowDotArgs args{type, width, a, a_row.data(), b, b_row.data(), out};
    ForRows(static_cast<int64_t>(a_row.size()), width,
            [&](int64_t begin, int64_t end) { passes_.dot(args, begin, end); });
  }

  void AdamW(const AdamWStep& step, int64_t n, float* master, float* m, float* v, const float* gradient,
             Type type, void* weights) override {
    LRMOE_KERNELS_REQUIRE(step.step >= 1);
    const double correction1 = 1 - std::pow(step.beta1, step.step);
    const double correction2 = 1 - std::pow(step.beta2, step.step);
    const AdamWArgs args{
        .decay = static_cast<float>(1 - step.lr * step.weight_decay),
        .beta1 = static_cast<float>(step.beta1),
        .one_minus_beta1 = static_cast<float>(1 - step.beta1),
        .beta2 = static_cast<float>(step.beta2),
        .one_minus_beta2 = static_cast<float>(1 - step.beta2),
        .sqrt_correction2 = static_cast<float>(std::sqrt(correction2)),
        .eps = static_cast<float>(step.eps),
        .minus_step_size = static_cast<float>(-step.lr / correction1),
        .gradient_scale = static_cast<float>(step.gradient_scale),
        .master = master,
        .m = m,
        .v = v,
        .gradient = gradient,
        .type = type,
        .weights = weights,
    };
    ForRows(n, 1, [&](int64_t begin, int64_t end) { passes_.adamw(args, begin, end); });
  }

  double SquaredNorm(int64_t n, const float* values) override {
    partial_.resize(NumTasks(n, kElementsPerTask));
    pool_.Run(static_cast<int64_t>(partial_.size()), [&](int64_t task, int) {
      const int64_t begin = task * kElementsPerTask;
      partial_[task] = passes_.squared_norm(values, begin, std::min(n, begin + kElementsPerTask));
    });
    double sum = 0;
    for (double part : partial_) sum += part;
    return sum;
  }

  void AddInPlace(int64_t n, float* dst, const float* src) override {
    ForRows(n, 1, [&](int64_t begin, int64_t end) { passes_.add(dst, src, begin, end); });
  }

  void Fp32ToBf16(int64_t n, const float* src, Bf16* dst) override {
    ForRows(n, 1, [&](int64_t begin, int64_t end) { passes_.to_bf16(src, dst, begin, end); });
  }

  void Bf16ToFp32(int64_t n, const Bf16* src, float* dst) override {
    ForRows(n, 1, [&](int64_t begin, int64_t end) { passes_.to_fp32(src, dst, begin, end); });
  }

 private:
  static int64_t NumTasks(int64_t rows, int64_t rows_per_task) {
    return (rows + rows_per_task - 1) / rows_per_task;
  }

  // work(begin, end) over disjoint ranges that cover [0, rows); row_elements is what one row costs.
  void ForRows(int64_t rows, int64_t row_elements, absl::FunctionRef<void(int64_t, int64_t)> work) {
    LRMOE_KERNELS_REQUIRE(rows >= 0 && row_elements >= 1);
    const int64_t rows_per_task = std::max<int64_t>(1, kElementsPerTask / row_elements);
    pool_.Run(NumTasks(rows, rows_per_task), [&](int64_t task, int) {
      work(task * rows_per_task, std::min(rows, (task + 1) * rows_per_task));
    });
  }

  const Passes& passes_;
  ThreadPool pool_;
  cpu::GroupedGemm gemm_;
  std::vector<double> partial_;  // of SquaredNorm
};

}  // namespace

std::unique_ptr<Device> MakeCpuDevice(int num_threads, const Passes& passes, Bf16Path bf16_path) {
  LRMOE_KERNELS_REQUIRE(num_threads >= 1);
  return std::make_unique<CpuDevice>(num_threads, passes, bf16_path);
}

}  // namespace cpu

absl::StatusOr<std::unique_ptr<Device>> CreateCpuDevice(int num_threads) {
  if (num_threads < 1 || num_threads > 256)
    return absl::InvalidArgumentError(absl::StrCat("num_threads is ", num_threads, "; allowed: 1..256"));
  try {
    return cpu::MakeCpuDevice(num_threads, cpu::SelectPasses(), cpu::ChooseBf16Path());
  } catch (const std::exception& error) {  // no thread to be had, or no CPU engine in oneDNN
    return absl::ResourceExhaustedError(
        absl::StrCat("CPU device with ", num_threads, " threads: ", error.what()));
  }
}

bool CpuPacksWeights(Type type) {
  return cpu::PacksWeights(type, cpu::ChooseBf16Path());
}

}  // namespace lrmoe::kernels
