#include "kernels/cuda/device.h"

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/passes.h"
#include "kernels/cuda/staging.h"

namespace lrmoe::kernels::cuda {
namespace {

// Staged values that may be under way; beyond this the device waits for its stream.
constexpr int64_t kStagedBytesLimit = int64_t{256} << 20;

class CudaDevice : public Device {
 public:
  CudaDevice(std::unique_ptr<Runtime> runtime, std::unique_ptr<GemmBackend> gemm)
      : runtime_(std::move(runtime)),
        gemm_(std::move(gemm)),
        staging_(runtime_.get()),
        path_(absl::StrCat(runtime_->name(), ", ", gemm_->path())) {}
  ~CudaDevice() override { (void)runtime_->Synchronize(); }  // nothing may use memory that goes

  absl::string_view gemm_path() const override { return path_; }
  bool Holds(const void* pointer) const override { return runtime_->Holds(pointer); }
  int64_t memory_bytes() const override { return runtime_->memory_bytes(); }
  Interprocess* interprocess() override { return &runtime_->interprocess(); }
  absl::StatusOr<std::unique_ptr<Memory>> Reserve(int64_t bytes) override { return runtime_->Reserve(bytes); }

  absl::StatusOr<std::unique_ptr<Memory>> AllocatePinned(int64_t bytes) override {
    return runtime_->AllocatePinned(bytes);
  }

  void Upload(void* dst, const void* src, int64_t bytes) override {
    if (bytes > 0) Keep(runtime_->Copy(dst, src, bytes, Direction::kToDevice));
  }
  void Download(void* dst, const void* src, int64_t bytes) override {
    if (bytes > 0) Keep(runtime_->Copy(dst, src, bytes, Direction::kToHost));
  }
  void Copy(void* dst, const void* src, int64_t bytes) override {
    if (bytes > 0) Keep(runtime_->Copy(dst, src, bytes, Direction::kWithin));
  }
  void Fill(void* dst, uint8_t value, int64_t bytes) override {
    if (bytes > 0) Keep(runtime_->Fill(dst, value, bytes));
  }

  absl::Status Wait() override {
    if (absl::Status status = runtime_->Synchronize(); !status.ok()) Keep(status);
    if (!error_.ok()) return error_;
    staging_.Finish();
    return absl::OkStatus();
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
      Expect("GroupedGemm", {group.a, group.b, group.c});
      present_.push_back(group);
    }
    if (!present_.empty()) Do([&] { return gemm_->Run(runtime_->stream(), kind, type, n, k, present_); });
    return error_;
  }

  void ActivationForward(ExpertActivation activation, Type type, int64_t rows, int64_t f, const void* a,
                         void* phi, float* norm2) override {
    Expect("ActivationForward", {a, phi});
    ToHost(norm2, rows, [&](float* out) {
      return cuda::ActivationForward(runtime_->stream(), activation, type, rows, f, a, phi, out);
    });
  }

  void ActivationBackward(ExpertActivation activation, Type type, int64_t rows, int64_t f, const void* a,
                          const void* u, const float* alpha, void* da, void* phi_alpha,
                          float* dalpha) override {
    Expect("ActivationBackward", {a, u, da, phi_alpha});
    const float* staged = In(alpha, rows);
    ToHost(dalpha, rows, [&](float* out) {
      return cuda::ActivationBackward(runtime_->stream(),
                                      {activation, type, rows, f, a, u, staged, da, phi_alpha, out});
    });
  }

  void GatherRows(Type type, int64_t width, const void* src, std::span<const int32_t> index,
                  void* dst) override {
    Expect("GatherRows", {src, dst});
    const auto rows = static_cast<int64_t>(index.size());
    const int32_t* staged = In(index.data(), rows);
    Do([&] { return cuda::GatherRows(runtime_->stream(), type, width, src, staged, rows, dst); });
  }

  void CombineRows(Type type, int64_t width, int64_t num_tokens, int32_t k, const void* y,
                   const int32_t* position, const float* alpha, void* out) override {
    Expect("CombineRows", {y, out});
    const int32_t* staged_position = In(position, num_tokens * k);
    const float* staged_alpha = In(alpha, num_tokens * k);
    Do([&] {
      return cuda::CombineRows(runtime_->stream(),
                               {type, width, num_tokens, k, y, staged_position, staged_alpha, out});
    });
  }

  void SumRows(Type type, int64_t width, const void* src, std::span<const int32_t> index,
               std::span<const int64_t> offset, void* dst) override {
    Expect("SumRows", {src, dst});
    if (offset.empty()) return Keep(absl::InvalidArgumentError("offset is empty; allowed: one and more"));
    const int32_t* staged_index = In(index.data(), static_cast<int64_t>(index.size()));
    const int64_t* staged_offset = In(offset.data(), static_cast<int64_t>(offset.size()));
    const int64_t rows = static_cast<int64_t>(offset.size()) - 1;
    Do([&] {
      return cuda::SumRows(runtime_->stream(), {type, width, rows, src, staged_index, staged_offset, dst});
    });
  }

  void RowNorm2(Type type, int64_t rows, int64_t width, const void* src, float* out) override {
    Expect("RowNorm2", {src});
    ToHost(out, rows,
           [&](float* to) { return cuda::RowNorm2(runtime_->stream(), type, rows, width, src, to); });
  }
  void RowAbsSum(Type type, int64_t rows, int64_t width, const void* src, float* out) override {
    Expect("RowAbsSum", {src});
    ToHost(out, rows,
           [&](float* to) { return cuda::RowAbsSum(runtime_->stream(), type, rows, width, src, to); });
  }

  void RowDot(Type type, int64_t width, const void* a, std::span<const int32_t> a_row, const void* b,
              std::span<const int32_t> b_row, float* out) override {
    Expect("RowDot", {a, b});
    const auto rows = static_cast<int64_t>(a_row.size());
    const int32_t* staged_a = In(a_row.data(), rows);
    const int32_t* staged_b = In(b_row.data(), rows);
    ToHost(out, rows, [&](float* to) {
      return cuda::RowDot(runtime_->stream(), {type, width, rows, a, staged_a, b, staged_b, to});
    });
  }

  void PermuteRows(int64_t row_bytes, std::span<int32_t> to, void* rows) override {
    Expect("PermuteRows", {rows});
    const auto num_rows = static_cast<int64_t>(to.size());
    const int64_t columns = PermutedColumns(row_bytes / 2, num_rows);
    const int32_t* staged = In(to.data(), num_rows);
    void* aside = Scratch(num_rows * columns * 2);
    for (int64_t first = 0; first < row_bytes / 2; first += columns) {
      const int64_t count = std::min(columns, row_bytes / 2 - first);
      Do([&] {
        return cuda::PermuteColumns(runtime_->stream(),
                                    {row_bytes / 2, first, count, num_rows, staged, rows, aside});
      });
    }
  }

  void AdamW(const AdamWStep& step, int64_t n, float* master, float* m, float* v, const float* gradient,
             Type type, void* weights) override {
    Expect("AdamW", {master, m, v, gradient, weights});
    Do([&] { return cuda::AdamW(runtime_->stream(), {step, n, master, m, v, gradient, type, weights}); });
  }

  double SquaredNorm(int64_t n, const float* values) override {
    Expect("SquaredNorm", {values});
    double sum = 0;
    auto* partial = static_cast<double*>(Scratch(kPartialSums * static_cast<int64_t>(sizeof(double))));
    auto* out = static_cast<double*>(Scratch(sizeof(double)));
    Do([&] { return cuda::SquaredNorm(runtime_->stream(), n, values, partial, out); });
    Deliver(&sum, out, sizeof(double));
    return Wait().ok() ? sum : std::numeric_limits<double>::quiet_NaN();
  }

  void AddInPlace(int64_t n, float* dst, const float* src) override {
    Expect("AddInPlace", {dst, src});
    Do([&] { return cuda::AddInPlace(runtime_->stream(), n, dst, src); });
  }
  void Fp32ToBf16(int64_t n, const float* src, Bf16* dst) override {
    Expect("Fp32ToBf16", {dst, src});
    Do([&] { return cuda::Fp32ToBf16(runtime_->stream(), n, src, dst); });
  }
  void Bf16ToFp32(int64_t n, const Bf16* src, float* dst) override {
    Expect("Bf16ToFp32", {dst, src});
    Do([&] { return cuda::Bf16ToFp32(runtime_->stream(), n, src, dst); });
  }

 private:
  void Keep(absl::Status status) {
    if (error_.ok()) error_ = std::move(status);
  }

  // A pointer to other memory would end in an illegal access, which takes the whole context with it. Null: no
  // rows.
  void Expect(const char* operation, std::initializer_list<const void*> pointers) {
    for (const void* pointer : pointers)
      if (pointer != nullptr && !runtime_->Holds(pointer))
        Keep(absl::InvalidArgumentError(
            absl::StrCat(operation, ": rows outside the memory of ", runtime_->name())));
  }

  // After an error nothing more is enqueued: pointers of failed staging would be null.
  void Do(absl::FunctionRef<absl::Status()> enqueue) {
    if (error_.ok()) Keep(runtime_->Launch(enqueue));
    if (staging_.bytes_in_use() > kStagedBytesLimit) Keep(Wait());
  }

  // [count] elements of the host, where kernels read them.
  template <typename T>
  const T* In(const T* src, int64_t count) {
    absl::StatusOr<const void*> staged = staging_.In(src, count * static_cast<int64_t>(sizeof(T)));
    if (!staged.ok()) {
      Keep(staged.status());
      return nullptr;
    }
    return static_cast<const T*>(*staged);
  }

  void* Scratch(int64_t bytes) {
    absl::StatusOr<void*> scratch = staging_.Scratch(bytes);
    if (scratch.ok()) return *scratch;
    Keep(scratch.status());
    return nullptr;
  }

  void Deliver(void* dst, const void* scratch, int64_t bytes) {
    if (error_.ok()) Keep(staging_.Out(dst, scratch, bytes));
  }

  // Runs a pass whose result, one float per row, belongs to the host.
  void ToHost(float* dst, int64_t rows, absl::FunctionRef<absl::Status(float*)> pass) {
    const int64_t bytes = rows * static_cast<int64_t>(sizeof(float));
    auto* out = static_cast<float*>(Scratch(bytes));
    if (error_.ok()) Keep(runtime_->Launch([&] { return pass(out); }));
    Deliver(dst, out, bytes);
  }

  const std::unique_ptr<Runtime> runtime_;
  const std::unique_ptr<GemmBackend> gemm_;
  Staging staging_;
  const std::string path_;
  absl::Status error_;              // the first
  std::vector<GemmGroup> present_;  // of the current call
};

}  // namespace

std::unique_ptr<Device> MakeCudaDevice(std::unique_ptr<Runtime> runtime, std::unique_ptr<GemmBackend> gemm) {
  return std::make_unique<CudaDevice>(std::move(runtime), std::move(gemm));
}

}  // namespace lrmoe::kernels::cuda
