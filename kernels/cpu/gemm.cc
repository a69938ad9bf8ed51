#include "kernels/cpu/gemm.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>

#include "absl/strings/str_cat.h"
#include "dnnl.hpp"

namespace lrmoe::kernels::cpu {
namespace {

// Large enough that oneDNN's own packing of a block's operands is a few percent, small enough to balance.
constexpr int64_t kBlockM = 256;
constexpr int64_t kBlockN = 512;
constexpr int64_t kWidenK = 512;  // depth widened at a time, so that scratch stays in the L2/L3 cache

// C[m, n] (+)= op(A) op(B) with depth k: a group's product or a block of it, row-major.
struct Product {
  bool transpose_a, transpose_b, accumulate;
  int64_t m, n, k;
  int64_t lda, ldb, ldc;
};

// The whole product of a group of `rows`.
Product ProductOf(GemmKind kind, int64_t n, int64_t k, int64_t rows) {
  switch (kind) {
    case GemmKind::kForward:
      return {false, true, false, rows, n, k, k, k, n};
    case GemmKind::kInputGradient:
      return {false, false, false, rows, n, k, k, n, n};
    case GemmKind::kWeightGradient:
      break;
  }
  return {true, false, true, n, k, rows, n, k, k};
}

int64_t Ceil(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Pieces of at most `limit`, as equal as multiples of 16 allow.
int64_t PieceOf(int64_t size, int64_t limit) {
  return std::min(limit, Ceil(Ceil(size, Ceil(size, limit)), 16) * 16);
}

const void* At(const void* base, int64_t element, Type type) {
  return static_cast<const char*>(base) + element * SizeOf(type);
}
void* At(void* base, int64_t element, Type type) {
  return static_cast<char*>(base) + element * SizeOf(type);
}

dnnl_status_t Sgemm(const Product& p, const float* a, const float* b, float* c) {
  return dnnl_sgemm(p.transpose_a ? 'T' : 'N', p.transpose_b ? 'T' : 'N', p.m, p.n, p.k, 1.0f, a, p.lda, b,
                    p.ldb, p.accumulate ? 1.0f : 0.0f, c, p.ldc);
}

// A bf16 matmul with every size given at execution: creating one costs 100 us and more, row counts never
// repeat.
dnnl::matmul::primitive_desc DescribeMatmul(const dnnl::engine& engine, bool transpose_a, bool transpose_b,
                                            bool accumulate) {
  using dnnl::memory;
  constexpr int64_t kRuntime = DNNL_RUNTIME_DIM_VAL;
  const memory::dims any = {kRuntime, kRuntime};
  const memory::dims plain = {kRuntime, 1}, transposed = {1, kRuntime};
  const memory::desc a(any, memory::data_type::bf16, transpose_a ? transposed : plain);
  const memory::desc b(any, memory::data_type::bf16, transpose_b ? transposed : plain);
  const memory::desc c(any, accumulate ? memory::data_type::f32 : memory::data_type::bf16, plain);
  dnnl::primitive_attr attributes;
  if (accumulate) {
    dnnl::post_ops add;
    add.append_sum(1.0f);
    attributes.set_post_ops(add);
  }
  return dnnl::matmul::primitive_desc({a, b, c}, attributes, engine);
}

bool HasBf16Instructions() {
  switch (dnnl::get_effective_cpu_isa()) {
    case dnnl::cpu_isa::avx512_core_bf16:
    case dnnl::cpu_isa::avx512_core_amx:
      return true;
    default:
      return false;
  }
}

// oneDNN runs on the calling thread alone inside this scope.
class SerialOneDnn {
 public:
  SerialOneDnn() : before_(omp_get_max_threads()) { omp_set_num_threads(1); }
  ~SerialOneDnn() { omp_set_num_threads(before_); }
  SerialOneDnn(const SerialOneDnn&) = delete;
  SerialOneDnn& operator=(const SerialOneDnn&) = delete;

 private:
  const int before_;
};

}  // namespace

Bf16Path ChooseBf16Path() {
  if (!HasBf16Instructions()) return Bf16Path::kWiden;
  try {
    const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
    for (bool accumulate : {false, true}) {
      const std::string name = DescribeMatmul(engine, accumulate, false, accumulate).impl_info_str();
      if (name.rfind("ref", 0) == 0) return Bf16Path::kWiden;
    }
    return Bf16Path::kMatmul;
  } catch (const dnnl::error&) {
    return Bf16Path::kWiden;
  }
}

struct GroupedGemm::Worker {
  explicit Worker(const Passes* p) : passes(p) {}

  dnnl_status_t Widened(const Product& p, const void* a, const void* b, void* c);
  dnnl_status_t Matmul(const Product& p, const void* a, const void* b, void* c);

  const Passes* const passes;
  std::vector<float> wide_a, wide_b, wide_c;
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::array<std::optional<dnnl::matmul>, 8> matmuls;  // by transpose_a, transpose_b, accumulate
};

namespace {

// fp32 copy of a bf16 matrix; dst is contiguous.
void Widen(const Passes& passes, const Bf16* src, int64_t rows, int64_t width, int64_t stride, float* dst) {
  for (int64_t row = 0; row < rows; ++row) passes.to_fp32(src + row * stride, dst + row * width, 0, width);
}

}  // namespace

dnnl_status_t GroupedGemm::Worker::Widened(const Product& p, const void* a, const void* b, void* c) {
  wide_a.resize(kBlockM * kWidenK);
  wide_b.resize(kBlockN * kWidenK);
  wide_c.resize(kBlockM * kBlockN);
  for (int64_t k0 = 0; k0 < p.k; k0 += kWidenK) {
    Product part = p;
    part.k = std::min(kWidenK, p.k - k0);
    part.lda = p.transpose_a ? p.m : part.k;
    part.ldb = p.transpose_b ? part.k : p.n;
    const Bf16* a0 = static_cast<const Bf16*>(a) + (p.transpose_a ? k0 * p.lda : k0);
    const Bf16* b0 = static_cast<const Bf16*>(b) + (p.transpose_b ? k0 : k0 * p.ldb);
    Widen(*passes, a0, p.transpose_a ? part.k : p.m, part.lda, p.lda, wide_a.data());
    Widen(*passes, b0, p.transpose_b ? p.n : part.k, part.ldb, p.ldb, wide_b.data());
    float* out = static_cast<float*>(c);
    if (!p.accumulate) {  // a bf16 result: summed in scratch, rounded once
      out = wide_c.data();
      part.ldc = p.n;
      part.accumulate = k0 > 0;
    }
    const dnnl_status_t status = Sgemm(part, wide_a.data(), wide_b.data(), out);
    if (status != dnnl_success) return status;
  }
  if (!p.accumulate) {
    for (int64_t row = 0; row < p.m; ++row) {
      passes->to_bf16(wide_c.data() + row * p.n, static_cast<Bf16*>(c) + row * p.ldc, 0, p.n);
    }
  }
  return dnnl_success;
}

dnnl_status_t GroupedGemm::Worker::Matmul(const Product& p, const void* a, const void* b, void* c) {
  using dnnl::memory;
  const auto matrix = [this](int64_t rows, int64_t columns, memory::data_type type,
                             const memory::dims& strides, const void* at) {
    return memory({{rows, columns}, type, strides}, engine, const_cast<void*>(at));
  };
  try {
    std::optional<dnnl::matmul>& matmul = matmuls[p.transpose_a * 4 + p.transpose_b * 2 + p.accumulate];
    if (!matmul) matmul.emplace(DescribeMatmul(engine, p.transpose_a, p.transpose_b, p.accumulate));
    constexpr auto kBf16 = memory::data_type::bf16;
    const memory::dims a_strides = p.transpose_a ? memory::dims{1, p.lda} : memory::dims{p.lda, 1};
    const memory::dims b_strides = p.transpose_b ? memory::dims{1, p.ldb} : memory::dims{p.ldb, 1};
    matmul->execute(
        stream,
        {{DNNL_ARG_SRC, matrix(p.m, p.k, kBf16, a_strides, a)},
         {DNNL_ARG_WEIGHTS, matrix(p.k, p.n, kBf16, b_strides, b)},
         {DNNL_ARG_DST, matrix(p.m, p.n, p.accumulate ? memory::data_type::f32 : kBf16, {p.ldc, 1}, c)}});
    stream.wait();
    return dnnl_success;
  } catch (const dnnl::error& error) {
    return error.status;
  }
}

GroupedGemm::GroupedGemm(ThreadPool* pool, const Passes* passes, Bf16Path bf16_path)
    : pool_(pool), passes_(passes), bf16_path_(bf16_path) {
  for (int i = 0; i < pool->num_threads(); ++i) workers_.push_back(std::make_unique<Worker>(passes));
}

GroupedGemm::~GroupedGemm() = default;

absl::string_view GroupedGemm::path() const {
  return bf16_path_ == Bf16Path::kMatmul ? "bf16: oneDNN matmul; fp32: oneDNN sgemm"
                                         : "bf16: widened to fp32, oneDNN sgemm; fp32: oneDNN sgemm";
}

void GroupedGemm::CutIntoBlocks(GemmKind kind, int64_t n, int64_t k, std::span<const GemmGroup> groups) {
  blocks_.clear();
  for (size_t group = 0; group < groups.size(); ++group) {
    if (groups[group].rows == 0) continue;
    const Product p = ProductOf(kind, n, k, groups[group].rows);
    const int64_t step_m = PieceOf(p.m, kBlockM), step_n = PieceOf(p.n, kBlockN);
    for (int64_t n0 = 0; n0 < p.n; n0 += step_n) {
      for (int64_t m0 = 0; m0 < p.m; m0 += step_m) {
        blocks_.push_back(
            {static_cast<int32_t>(group), m0, std::min(p.m, m0 + step_m), n0, std::min(p.n, n0 + step_n)});
      }
    }
  }
}

absl::Status GroupedGemm::Run(GemmKind kind, Type type, int64_t n, int64_t k,
                              std::span<const GemmGroup> groups) {
  if (n < 1 || k < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("grouped GEMM: n is ", n, ", k is ", k, "; allowed: >= 1"));
  for (const GemmGroup& group : groups) {
    if (group.rows < 0 || (group.rows > 0 && (!group.a || !group.b || !group.c)))
      return absl::InvalidArgumentError(absl::StrCat("grouped GEMM: group ", &group - groups.data(), " of ",
                                                     groups.size(), " has ", group.rows,
                                                     " rows or a null matrix; allowed: rows >= 0, no null"));
  }
  CutIntoBlocks(kind, n, k, groups);

  std::atomic<int> failure{dnnl_success};
  pool_->Run(static_cast<int64_t>(blocks_.size()), [&](int64_t task, int thread) {
    const SerialOneDnn serial;
    const Block& block = blocks_[task];
    const GemmGroup& group = groups[block.group];
    Product p = ProductOf(kind, n, k, group.rows);
    const void* a = At(group.a, p.transpose_a ? block.m0 : block.m0 * p.lda, type);
    const void* b = At(group.b, p.transpose_b ? block.n0 * p.ldb : block.n0, type);
    void* c = At(group.c, block.m0 * p.ldc + block.n0, p.accumulate ? Type::kFp32 : type);
    p.m = block.m1 - block.m0;
    p.n = block.n1 - block.n0;
    Worker& worker = *workers_[thread];
    const dnnl_status_t status =
        type == Type::kFp32
            ? Sgemm(p, static_cast<const float*>(a), static_cast<const float*>(b), static_cast<float*>(c))
        : bf16_path_ == Bf16Path::kMatmul ? worker.Matmul(p, a, b, c)
                                          : worker.Widened(p, a, b, c);
    if (status != dnnl_success) failure.store(status, std::memory_order_relaxed);
  });
  if (failure != dnnl_success)
    return absl::InternalError(absl::StrCat("grouped GEMM: oneDNN failed with status ", failure.load(), " (",
                                            path(), "; n ", n, ", k ", k, ")"));
  return absl::OkStatus();
}

}  // namespace lrmoe::kernels::cpu
