// Grouped GEMM on cuBLAS: one GEMM per group over several streams, or one grouped call (gemm_shape.h
// chooses).
#include <cublas_v2.h>
#include <cuda_runtime.h>

#include <array>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "kernels/cuda/cuda_status.h"
#include "kernels/cuda/device.h"

namespace lrmoe::kernels::cuda {
namespace {

// Enough to fill the device with the tails of GEMMs of a few hundred rows.
constexpr int32_t kStreams = 4;
// What cuBLAS recommends on Hopper. Own and fixed per handle, so that the same call finds the same workspace:
// its results are repeatable only then when several streams are active.
constexpr size_t kWorkspaceBytes = size_t{32} << 20;

using cuda::ToStatus;
absl::Status ToStatus(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  const std::string message = absl::StrCat(what, ": ", cublasGetStatusName(status));
  return status == CUBLAS_STATUS_ALLOC_FAILED ? absl::ResourceExhaustedError(message)
                                              : absl::InternalError(message);
}

#define LRMOE_CUBLAS_RETURN_IF_ERROR(call)                                                         \
  do {                                                                                             \
    if (absl::Status blas_status = ToStatus((call), #call); !blas_status.ok()) return blas_status; \
  } while (false)

cudaDataType_t ToCuda(Type type) {
  return type == Type::kBf16 ? CUDA_R_16BF : CUDA_R_32F;
}
cublasOperation_t ToCublas(bool transpose) {
  return transpose ? CUBLAS_OP_T : CUBLAS_OP_N;
}

class CublasGemm : public GemmBackend {
 public:
  explicit CublasGemm(GemmPathRule rule) : rule_(rule) {}
  ~CublasGemm() override {
    for (Lane& lane : lanes_) {
      if (lane.handle != nullptr) (void)cublasDestroy(lane.handle);
      if (lane.workspace != nullptr) (void)cudaFree(lane.workspace);
      if (lane.done != nullptr) (void)cudaEventDestroy(lane.done);
      if (lane.stream != nullptr) (void)cudaStreamDestroy(lane.stream);
    }
    if (ready_ != nullptr) (void)cudaEventDestroy(ready_);
  }

  absl::Status Start() {
    LRMOE_CUBLAS_RETURN_IF_ERROR(cudaEventCreateWithFlags(&ready_, cudaEventDisableTiming));
    for (Lane& lane : lanes_) {
      LRMOE_CUBLAS_RETURN_IF_ERROR(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking));
      LRMOE_CUBLAS_RETURN_IF_ERROR(cudaEventCreateWithFlags(&lane.done, cudaEventDisableTiming));
      LRMOE_CUBLAS_RETURN_IF_ERROR(cudaMalloc(&lane.workspace, kWorkspaceBytes));
      LRMOE_CUBLAS_RETURN_IF_ERROR(cublasCreate(&lane.handle));
      LRMOE_CUBLAS_RETURN_IF_ERROR(cublasSetStream(lane.handle, lane.stream));
      LRMOE_CUBLAS_RETURN_IF_ERROR(cublasSetWorkspace(lane.handle, lane.workspace, kWorkspaceBytes));
      // No TF32, and bf16 products summed in fp32 to the end.
      LRMOE_CUBLAS_RETURN_IF_ERROR(cublasSetMathMode(
          lane.handle,
          static_cast<cublasMath_t>(CUBLAS_DEFAULT_MATH | CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION)));
    }
    int version = 0;
    LRMOE_CUBLAS_RETURN_IF_ERROR(cublasGetVersion(lanes_[0].handle, &version));
    path_ = absl::StrCat("cuBLAS ", version, ", ",
                         rule_ == GemmPathRule::kGrouped   ? "one grouped call where types allow"
                         : rule_ == GemmPathRule::kStreams ? "a GEMM per group"
                                                           : "a GEMM per group, small ones in a grouped call",
                         " (", kStreams, " streams)");
    return absl::OkStatus();
  }

  absl::string_view path() const override { return path_; }

  // The lanes begin when `stream` has come here and `stream` goes on when they are done: in its order. Also
  // after an error, as some may have begun.
  absl::Status Run(Stream stream, GemmKind kind, Type type, int64_t n, int64_t k,
                   std::span<const GemmGroup> groups) override {
    const auto main = static_cast<cudaStream_t>(stream);
    const bool grouped = ChooseGemmPath(rule_, kind, type, groups) == GemmPath::kGrouped;
    const size_t num_lanes = grouped ? 1 : std::min<size_t>(kStreams, groups.size());
    LRMOE_CUBLAS_RETURN_IF_ERROR(cudaEventRecord(ready_, main));
    for (size_t i = 0; i < num_lanes; ++i)
      LRMOE_CUBLAS_RETURN_IF_ERROR(cudaStreamWaitEvent(lanes_[i].stream, ready_, 0));
    absl::Status status = grouped ? RunGrouped(kind, type, n, k, groups) : RunLoop(kind, type, n, k, groups);
    for (size_t i = 0; i < num_lanes; ++i) {
      status.Update(ToStatus(cudaEventRecord(lanes_[i].done, lanes_[i].stream), "recording a lane's end"));
      status.Update(ToStatus(cudaStreamWaitEvent(main, lanes_[i].done, 0), "waiting for a lane"));
    }
    return status;
  }

 private:
  struct Lane {
    cudaStream_t stream = nullptr;
    cudaEvent_t done = nullptr;
    void* workspace = nullptr;
    cublasHandle_t handle = nullptr;
  };

  absl::Status RunLoop(GemmKind kind, Type type, int64_t n, int64_t k, std::span<const GemmGroup> groups) {
    const cudaDataType_t in = ToCuda(type);
    const cudaDataType_t out = kind == GemmKind::kWeightGradient ? CUDA_R_32F : in;
    const std::vector<int32_t> lane = SpreadOverStreams(groups, kStreams);
    const float alpha = 1;
    for (size_t i = 0; i < groups.size(); ++i) {
      const BlasShape s = ToColumnMajor(kind, n, k, groups[i].rows, groups[i].overwrite);
      LRMOE_CUBLAS_RETURN_IF_ERROR(
          cublasGemmEx_64(lanes_[lane[i]].handle, ToCublas(s.transpose_a), ToCublas(s.transpose_b), s.m, s.n,
                          s.k, &alpha, groups[i].b, in, s.lda, groups[i].a, in, s.ldb, &s.beta, groups[i].c,
                          out, s.ldc, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
    }
    return absl::OkStatus();
  }

  // Shapes in host arrays, one group of one GEMM each; operands in tables in device memory, which live as
  // long as the stream needs them.
  absl::Status RunGrouped(GemmKind kind, Type type, int64_t n, int64_t k, std::span<const GemmGroup> groups) {
    const auto count = static_cast<int64_t>(groups.size());
    std::vector<cublasOperation_t> op_a, op_b;
    std::vector<int64_t> ms, ns, ks, lda, ldb, ldc;
    std::vector<float> betas;
    std::vector<const void*> table;  // A, B, C
    for (const GemmGroup& group : groups) {
      const BlasShape s = ToColumnMajor(kind, n, k, group.rows, group.overwrite);
      op_a.push_back(ToCublas(s.transpose_a)), op_b.push_back(ToCublas(s.transpose_b));
      ms.push_back(s.m), ns.push_back(s.n), ks.push_back(s.k);
      lda.push_back(s.lda), ldb.push_back(s.ldb), ldc.push_back(s.ldc);
      betas.push_back(s.beta);
      table.push_back(group.b);
    }
    for (const GemmGroup& group : groups) table.push_back(group.a);
    for (const GemmGroup& group : groups) table.push_back(group.c);
    const std::vector<float> alphas(count, 1.0F);
    const std::vector<int64_t> sizes(count, 1);
    Lane& lane = lanes_[0];
    void* memory = nullptr;
    const size_t bytes = table.size() * sizeof(void*);
    LRMOE_CUBLAS_RETURN_IF_ERROR(cudaMallocAsync(&memory, bytes, lane.stream));
    auto* const device = static_cast<void**>(memory);
    absl::Status status =
        ToStatus(cudaMemcpyAsync(device, table.data(), bytes, cudaMemcpyHostToDevice, lane.stream),
                 "copying a table of operands");
    const cudaDataType_t data = ToCuda(type);
    if (status.ok())
      status =
          ToStatus(cublasGemmGroupedBatchedEx_64(
                       lane.handle, op_a.data(), op_b.data(), ms.data(), ns.data(), ks.data(), alphas.data(),
                       device, data, lda.data(), device + count, data, ldb.data(), betas.data(),
                       device + 2 * count, data, ldc.data(), count, sizes.data(), CUBLAS_COMPUTE_32F),
                   "cublasGemmGroupedBatchedEx");
    status.Update(ToStatus(cudaFreeAsync(memory, lane.stream), "freeing a table of operands"));
    return status;
  }

  const GemmPathRule rule_;
  std::array<Lane, kStreams> lanes_;
  cudaEvent_t ready_ = nullptr;
  std::string path_;
};

}  // namespace

absl::StatusOr<std::unique_ptr<GemmBackend>> CreateCublasGemm(GemmPathRule rule) {
  auto gemm = std::make_unique<CublasGemm>(rule);
  if (absl::Status status = gemm->Start(); !status.ok()) return status;
  return gemm;
}

}  // namespace lrmoe::kernels::cuda
