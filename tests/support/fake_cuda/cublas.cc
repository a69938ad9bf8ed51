// cuBLAS' GEMMs, column-major as its documentation has them, by three loops.
#include <cublas_v2.h>

#include <algorithm>
#include <cstring>
#include <set>
#include <vector>

#include "tests/support/fake_cuda/state.h"

struct cublasContext {
  int device = 0;
  cudaStream_t stream = nullptr;
  bool own_workspace = false;
};

namespace lrmoe::fake_cuda {
namespace {

std::set<cublasHandle_t>& Handles() {
  static std::set<cublasHandle_t> handles;
  return handles;
}
cublasContext& Known(cublasHandle_t handle, const char* function) {
  if (!Handles().contains(handle)) Misuse(std::string(function) + ": no such handle, or one destroyed");
  if (handle->device != CurrentDevice())
    Misuse(std::string(function) + ": the device of the handle is not current");
  return *handle;
}
cublasStatus_t Error(const char* function) {
  return static_cast<cublasStatus_t>(Injected(function));
}

struct Matrix {
  const void* data;
  cudaDataType_t type;
  int64_t leading;
};
struct Gemm {
  cublasOperation_t op_a, op_b;
  int64_t m, n, k;
  float alpha, beta;
  Matrix a, b, c;
};

int64_t Size(cudaDataType_t type) {
  return type == CUDA_R_16BF ? 2 : 4;
}
float Load(const Matrix& matrix, int64_t row, int64_t column) {
  const auto* at =
      static_cast<const std::byte*>(matrix.data) + (column * matrix.leading + row) * Size(matrix.type);
  float value = 0;
  if (matrix.type == CUDA_R_32F) {
    std::memcpy(&value, at, sizeof(value));
  } else {
    uint16_t half;
    std::memcpy(&half, at, sizeof(half));
    const uint32_t bits = uint32_t{half} << 16;
    std::memcpy(&value, &bits, sizeof(value));
  }
  return value;
}
void Store(const Matrix& matrix, int64_t row, int64_t column, float value) {
  auto* const at = static_cast<std::byte*>(const_cast<void*>(matrix.data)) +
                   (column * matrix.leading + row) * Size(matrix.type);
  if (matrix.type == CUDA_R_32F) {
    std::memcpy(at, &value, sizeof(value));
  } else {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof(bits));
    const auto half = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);  // to nearest even
    std::memcpy(at, &half, sizeof(half));
  }
}

// Of a matrix of `rows` rows and `columns` columns as it is stored.
void CheckPlace(const Matrix& matrix, int64_t rows, int64_t columns, int device, const char* name) {
  if (rows > 0 && columns > 0)
    ExpectOnDevice(matrix.data, ((columns - 1) * matrix.leading + rows) * Size(matrix.type), device,
                   std::string("cuBLAS' matrix ") + name);
}
void CheckPlaces(const Gemm& g, int device) {
  CheckPlace(g.a, g.op_a == CUBLAS_OP_N ? g.m : g.k, g.op_a == CUBLAS_OP_N ? g.k : g.m, device, "A");
  CheckPlace(g.b, g.op_b == CUBLAS_OP_N ? g.k : g.n, g.op_b == CUBLAS_OP_N ? g.n : g.k, device, "B");
  CheckPlace(g.c, g.m, g.n, device, "C");
}

void Compute(const Gemm& g) {
  for (int64_t column = 0; column < g.n; ++column)
    for (int64_t row = 0; row < g.m; ++row) {
      float sum = 0;
      for (int64_t i = 0; i < g.k; ++i)
        sum += (g.op_a == CUBLAS_OP_N ? Load(g.a, row, i) : Load(g.a, i, row)) *
               (g.op_b == CUBLAS_OP_N ? Load(g.b, i, column) : Load(g.b, column, i));
      // C is not read where beta is 0.
      Store(g.c, row, column, g.alpha * sum + (g.beta == 0 ? 0 : g.beta * Load(g.c, row, column)));
    }
}

cublasStatus_t CheckSizes(const Gemm& g) {
  const auto known = [](cublasOperation_t op) { return op == CUBLAS_OP_N || op == CUBLAS_OP_T; };
  if (!known(g.op_a) || !known(g.op_b)) return CUBLAS_STATUS_INVALID_VALUE;
  if (g.m < 0 || g.n < 0 || g.k < 0) return CUBLAS_STATUS_INVALID_VALUE;
  if (g.a.leading < std::max<int64_t>(1, g.op_a == CUBLAS_OP_N ? g.m : g.k) ||
      g.b.leading < std::max<int64_t>(1, g.op_b == CUBLAS_OP_N ? g.k : g.n) ||
      g.c.leading < std::max<int64_t>(1, g.m))
    return CUBLAS_STATUS_INVALID_VALUE;
  return CUBLAS_STATUS_SUCCESS;
}

// Of those that cuBLAS computes in fp32, what this repository has rows of.
bool TypesAreKnown(cudaDataType_t a, cudaDataType_t b, cudaDataType_t c, bool grouped) {
  if (a != b) return false;
  if (a == CUDA_R_32F) return c == CUDA_R_32F;
  return a == CUDA_R_16BF && (c == CUDA_R_16BF || (c == CUDA_R_32F && !grouped));
}

// The documentation's rule for the pointers of grouped 16-bit operands.
void CheckAlignment(const Gemm& g) {
  if (g.a.type != CUDA_R_16BF) return;
  const uintptr_t wanted = g.k % 8 == 0 ? 16 : g.k % 2 == 0 ? 4 : 2;
  for (const Matrix* matrix : {&g.a, &g.b, &g.c})
    if (reinterpret_cast<uintptr_t>(matrix->data) % wanted != 0)
      Misuse("a matrix of a grouped call is not aligned as its k wants it");
}

}  // namespace
}  // namespace lrmoe::fake_cuda

using namespace lrmoe::fake_cuda;  // NOLINT: what follows are cuBLAS' own functions

cublasStatus_t cublasCreate(cublasHandle_t* handle) {
  const Lock lock(Mutex());
  if (const cublasStatus_t error = Error("cublasCreate"); error != CUBLAS_STATUS_SUCCESS) return error;
  *handle = new cublasContext{.device = CurrentDevice()};
  Handles().insert(*handle);
  ++Its().blas_handles;
  return CUBLAS_STATUS_SUCCESS;
}
// Waits for the device.
cublasStatus_t cublasDestroy(cublasHandle_t handle) {
  Lock lock(Mutex());
  if (!Handles().contains(handle)) Misuse("cublasDestroy of no handle");
  FinishDevice(handle->device, lock, __func__);
  Handles().erase(handle);
  delete handle;
  --Its().blas_handles;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasGetVersion(cublasHandle_t handle, int* version) {
  const Lock lock(Mutex());
  Known(handle, __func__);
  *version = CUBLAS_VERSION;
  return CUBLAS_STATUS_SUCCESS;
}
// Takes the handle's own workspace away.
cublasStatus_t cublasSetStream(cublasHandle_t handle, cudaStream_t stream) {
  const Lock lock(Mutex());
  if (const cublasStatus_t error = Error("cublasSetStream"); error != CUBLAS_STATUS_SUCCESS) return error;
  cublasContext& of = Known(handle, __func__);
  if (Known(stream, __func__).device != of.device) Misuse("cublasSetStream with another device's stream");
  of.stream = stream;
  of.own_workspace = false;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetWorkspace(cublasHandle_t handle, void* workspace, size_t bytes) {
  const Lock lock(Mutex());
  if (const cublasStatus_t error = Error("cublasSetWorkspace"); error != CUBLAS_STATUS_SUCCESS) return error;
  cublasContext& of = Known(handle, __func__);
  if (reinterpret_cast<uintptr_t>(workspace) % 256 != 0) return CUBLAS_STATUS_INVALID_VALUE;
  ExpectOnDevice(workspace, static_cast<int64_t>(bytes), of.device, "cuBLAS' workspace");
  of.own_workspace = true;
  return CUBLAS_STATUS_SUCCESS;
}
cublasStatus_t cublasSetMathMode(cublasHandle_t handle, cublasMath_t mode) {
  const Lock lock(Mutex());
  Known(handle, __func__);
  const int base = mode & ~CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION;
  return base == CUBLAS_DEFAULT_MATH ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
}
const char* cublasGetStatusName(cublasStatus_t status) {
  switch (status) {
    case CUBLAS_STATUS_ALLOC_FAILED:
      return "CUBLAS_STATUS_ALLOC_FAILED";
    case CUBLAS_STATUS_EXECUTION_FAILED:
      return "CUBLAS_STATUS_EXECUTION_FAILED";
    case CUBLAS_STATUS_INVALID_VALUE:
      return "CUBLAS_STATUS_INVALID_VALUE";
    case CUBLAS_STATUS_NOT_SUPPORTED:
      return "CUBLAS_STATUS_NOT_SUPPORTED";
    default:
      return "cublasStatus of this fake";
  }
}

// Scalars in host memory (the default), read before the call returns.
cublasStatus_t cublasGemmEx_64(cublasHandle_t handle, cublasOperation_t op_a, cublasOperation_t op_b,
                               int64_t m, int64_t n, int64_t k, const void* alpha, const void* a,
                               cudaDataType_t a_type, int64_t lda, const void* b, cudaDataType_t b_type,
                               int64_t ldb, const void* beta, void* c, cudaDataType_t c_type, int64_t ldc,
                               cublasComputeType_t compute, cublasGemmAlgo_t) {
  const Lock lock(Mutex());
  if (const cublasStatus_t error = Error("cublasGemmEx"); error != CUBLAS_STATUS_SUCCESS) return error;
  const cublasContext& of = Known(handle, __func__);
  if (alpha == nullptr || beta == nullptr) return CUBLAS_STATUS_INVALID_VALUE;
  if (compute != CUBLAS_COMPUTE_32F || !TypesAreKnown(a_type, b_type, c_type, false))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  const Gemm gemm{op_a,
                  op_b,
                  m,
                  n,
                  k,
                  *static_cast<const float*>(alpha),
                  *static_cast<const float*>(beta),
                  {a, a_type, lda},
                  {b, b_type, ldb},
                  {c, c_type, ldc}};
  if (const cublasStatus_t error = CheckSizes(gemm); error != CUBLAS_STATUS_SUCCESS) return error;
  ++Its().gemms.single;
  Its().gemms.without_workspace += of.own_workspace ? 0 : 1;
  Enqueue(Known(of.stream, __func__), [gemm, device = of.device] {
    Touch();
    CheckPlaces(gemm, device);
    Compute(gemm);
    return true;
  });
  return CUBLAS_STATUS_SUCCESS;
}

// Shapes and scalars in host memory, read before the call returns; tables of pointers in the device's, read
// when the stream gets there.
cublasStatus_t cublasGemmGroupedBatchedEx_64(
    cublasHandle_t handle, const cublasOperation_t op_a[], const cublasOperation_t op_b[], const int64_t m[],
    const int64_t n[], const int64_t k[], const void* alpha, const void* const a[], cudaDataType_t a_type,
    const int64_t lda[], const void* const b[], cudaDataType_t b_type, const int64_t ldb[], const void* beta,
    void* const c[], cudaDataType_t c_type, const int64_t ldc[], int64_t group_count,
    const int64_t group_size[], cublasComputeType_t compute) {
  const Lock lock(Mutex());
  if (const cublasStatus_t error = Error("cublasGemmGroupedBatchedEx"); error != CUBLAS_STATUS_SUCCESS)
    return error;
  const cublasContext& of = Known(handle, __func__);
  if (group_count < 0) return CUBLAS_STATUS_INVALID_VALUE;
  if (compute != CUBLAS_COMPUTE_32F || !TypesAreKnown(a_type, b_type, c_type, true))
    return CUBLAS_STATUS_NOT_SUPPORTED;
  std::vector<Gemm> gemms;
  for (int64_t group = 0; group < group_count; ++group) {
    const Gemm gemm{op_a[group],
                    op_b[group],
                    m[group],
                    n[group],
                    k[group],
                    static_cast<const float*>(alpha)[group],
                    static_cast<const float*>(beta)[group],
                    {nullptr, a_type, lda[group]},
                    {nullptr, b_type, ldb[group]},
                    {nullptr, c_type, ldc[group]}};
    if (const cublasStatus_t error = CheckSizes(gemm); error != CUBLAS_STATUS_SUCCESS) return error;
    gemms.insert(gemms.end(), group_size[group], gemm);
  }
  const auto bytes = static_cast<int64_t>(gemms.size() * sizeof(void*));
  for (const void* table :
       {static_cast<const void*>(a), static_cast<const void*>(b), static_cast<const void*>(c)})
    ExpectOnDevice(table, bytes, of.device, "a table of operands");
  ++Its().gemms.grouped;
  Its().gemms.without_workspace += of.own_workspace ? 0 : 1;
  Enqueue(Known(of.stream, __func__), [gemms, a, b, c, device = of.device] {
    Touch();
    for (size_t i = 0; i < gemms.size(); ++i) {
      Gemm gemm = gemms[i];
      gemm.a.data = a[i], gemm.b.data = b[i], gemm.c.data = c[i];
      CheckAlignment(gemm);
      CheckPlaces(gemm, device);
      Compute(gemm);
    }
    return true;
  });
  return CUBLAS_STATUS_SUCCESS;
}
