#include "kernels/cuda/device.h"

#include <algorithm>
#include <cstddef>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/pair_device.h"
#include "kernels/cuda/passes.h"

namespace lrmoe::kernels::cuda {
namespace {

class CudaDevice final : public PairDevice {
 public:
  CudaDevice(std::unique_ptr<Runtime> runtime, std::unique_ptr<GemmBackend> gemm)
      : PairDevice(std::move(runtime)),
        gemm_(std::move(gemm)),
        path_(absl::StrCat(this->runtime().name(), ", ", gemm_->path())) {}
  // Nothing may use memory that goes. When the stream never gets on, freeing would wait for it: what the
  // GEMMs have is freed with the process.
  ~CudaDevice() override {
    if (absl::IsDeadlineExceeded(runtime().Synchronize())) (void)gemm_.release();
  }

  absl::string_view gemm_path() const override { return path_; }
  bool Holds(const void* pointer) const override { return runtime().Holds(pointer); }
  int64_t memory_bytes() const override { return runtime().memory_bytes(); }
  Interprocess* interprocess() override { return &runtime().interprocess(); }
  absl::StatusOr<std::unique_ptr<Memory>> Reserve(int64_t bytes) override { return runtime().Reserve(bytes); }

  absl::StatusOr<std::unique_ptr<Memory>> AllocatePinned(int64_t bytes) override {
    return runtime().AllocatePinned(bytes);
  }

  void Upload(void* dst, const void* src, int64_t bytes) override {
    if (bytes > 0) Keep(runtime().Copy(dst, src, bytes, Direction::kToDevice));
  }
  void Download(void* dst, const void* src, int64_t bytes) override {
    if (bytes > 0) Keep(runtime().Copy(dst, src, bytes, Direction::kToHost));
  }
  void Copy(void* dst, const void* src, int64_t bytes) override {
    if (bytes > 0) Keep(runtime().Copy(dst, src, bytes, Direction::kWithin));
  }

  absl::Status GroupedGemm(GemmKind kind, Type type, int64_t n, int64_t k,
                           std::span<const GemmGroup> groups) override {
    if (n < 1 || k < 1)
      return absl::InvalidArgumentError(absl::StrCat("n is ", n, ", k is ", k, "; allowed: 1 and more"));
    if (kind == GemmKind::kPacked)
      return absl::InvalidArgumentError("weights are packed; allowed: plain, this device packs none");
    present_.clear();
    for (const GemmGroup& group : groups) {
      if (group.rows < 0)
        return absl::InvalidArgumentError(absl::StrCat("rows of a group is ", group.rows, "; allowed: >= 0"));
      if (group.rows == 0) continue;
      Expect("GroupedGemm", group.rows, {group.a, group.b, group.c});
      present_.push_back(group);
    }
    if (!present_.empty()) Do([&] { return gemm_->Run(runtime().stream(), kind, type, n, k, present_); });
    return error();
  }

  void ActivationForward(ExpertActivation activation, Type type, int64_t rows, int64_t f, const void* a,
                         void* phi, float* norm2) override {
    Expect("ActivationForward", rows, {a, phi, norm2});
    Do([&] { return cuda::ActivationForward(runtime().stream(), activation, type, rows, f, a, phi, norm2); });
  }

  void ActivationBackward(ExpertActivation activation, Type type, int64_t rows, int64_t f, const void* a,
                          const void* u, const float* alpha, void* da, void* phi_alpha,
                          float* dalpha) override {
    Expect("ActivationBackward", rows, {a, u, alpha, da, phi_alpha, dalpha});
    Do([&] {
      return cuda::ActivationBackward(runtime().stream(),
                                      {activation, type, rows, f, a, u, alpha, da, phi_alpha, dalpha});
    });
  }

  void GatherRows(Type type, int64_t width, const void* src, std::span<const int32_t> index,
                  void* dst) override {
    Expect("GatherRows", index.size(), {src, index.data(), dst});
    const auto rows = static_cast<int64_t>(index.size());
    Do([&] { return cuda::GatherRows(runtime().stream(), type, width, src, index.data(), rows, dst); });
  }

  void CombineRows(Type type, int64_t width, int64_t num_tokens, int32_t k, const void* y,
                   const int32_t* position, const float* alpha, void* out) override {
    Expect("CombineRows", num_tokens, {y, position, alpha, out});
    Do([&] {
      return cuda::CombineRows(runtime().stream(), {type, width, num_tokens, k, y, position, alpha, out});
    });
  }

  void SumRows(Type type, int64_t width, const void* src, std::span<const int32_t> index,
               std::span<const int64_t> offset, void* dst) override {
    if (offset.empty()) return Keep(absl::InvalidArgumentError("offset is empty; allowed: one and more"));
    const int64_t rows = static_cast<int64_t>(offset.size()) - 1;
    Expect("SumRows", rows, {offset.data(), dst});
    Expect("SumRows", index.size(), {src, index.data()});
    Do([&] {
      return cuda::SumRows(runtime().stream(), {type, width, rows, src, index.data(), offset.data(), dst});
    });
  }

  void RowNorm2(Type type, int64_t rows, int64_t width, const void* src, float* out) override {
    Expect("RowNorm2", rows, {src, out});
    Do([&] { return cuda::RowNorm2(runtime().stream(), type, rows, width, src, out); });
  }
  void RowAbsSum(Type type, int64_t rows, int64_t width, const void* src, float* out) override {
    Expect("RowAbsSum", rows, {src, out});
    Do([&] { return cuda::RowAbsSum(runtime().stream(), type, rows, width, src, out); });
  }

  void RowDot(Type type, int64_t width, const void* a, std::span<const int32_t> a_row, const void* b,
              std::span<const int32_t> b_row, float* out) override {
    Expect("RowDot", a_row.size(), {a, a_row.data(), b, b_row.data(), out});
    const auto rows = static_cast<int64_t>(a_row.size());
    Do([&] {
      return cuda::RowDot(runtime().stream(), {type, width, rows, a, a_row.data(), b, b_row.data(), out});
    });
  }

  void PermuteRows(int64_t row_bytes, std::span<int32_t> to, void* rows) override {
    Expect("PermuteRows", to.size(), {to.data(), rows});
    const auto num_rows = static_cast<int64_t>(to.size());
    const int64_t columns = PermutedColumns(row_bytes / 2, num_rows);
    void* aside = Scratch<std::byte>(num_rows * columns * 2);
    for (int64_t first = 0; first < row_bytes / 2; first += columns) {
      const int64_t count = std::min(columns, row_bytes / 2 - first);
      Do([&] {
        return cuda::PermuteColumns(runtime().stream(),
                                    {row_bytes / 2, first, count, num_rows, to.data(), rows, aside});
      });
    }
    Relieve();
  }

  void AdamW(const AdamWStep& step, int64_t n, float* master, float* m, float* v, const float* gradient,
             Type type, void* weights) override {
    Expect("AdamW", n, {master, m, v, gradient, weights});
    Do([&] { return cuda::AdamW(runtime().stream(), {step, n, master, m, v, gradient, type, weights}); });
  }

  double SquaredNorm(int64_t n, const float* values) override {
    Expect("SquaredNorm", n, {values});
    double sum = 0;
    auto* const partial = Scratch<double>(kPartialSums);
    auto* const out = Scratch<double>(1);
    Do([&] { return cuda::SquaredNorm(runtime().stream(), n, values, partial, out); });
    Deliver(std::span<double>(&sum, 1), out);
    return Wait().ok() ? sum : std::numeric_limits<double>::quiet_NaN();
  }

  void AddInPlace(int64_t n, float* dst, const float* src) override {
    Expect("AddInPlace", n, {dst, src});
    Do([&] { return cuda::AddInPlace(runtime().stream(), n, dst, src); });
  }
  void Fp32ToBf16(int64_t n, const float* src, Bf16* dst) override {
    Expect("Fp32ToBf16", n, {dst, src});
    Do([&] { return cuda::Fp32ToBf16(runtime().stream(), n, src, dst); });
  }
  void Bf16ToFp32(int64_t n, const Bf16* src, float* dst) override {
    Expect("Bf16ToFp32", n, {dst, src});
    Do([&] { return cuda::Bf16ToFp32(runtime().stream(), n, src, dst); });
  }

 private:
  std::unique_ptr<GemmBackend> gemm_;
  const std::string path_;
  std::vector<GemmGroup> present_;  // of the current call
};

}  // namespace

std::unique_ptr<Device> MakeCudaDevice(std::unique_ptr<Runtime> runtime, std::unique_ptr<GemmBackend> gemm) {
  return std::make_unique<CudaDevice>(std::move(runtime), std::move(gemm));
}

}  // namespace lrmoe::kernels::cuda
