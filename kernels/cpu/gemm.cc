#include "kernels/cpu/gemm.h"

#include <omp.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "dnnl.hpp"
#include "kernels/cpu/packed_gemm.h"
#include "kernels/precondition.h"

namespace lrmoe::kernels::cpu {
namespace {

// Limits of a block. For sgemm: operands and result stay in a core's L2 cache (512 KiB and more) while it
// works.
constexpr int64_t kBlockM = 96;
constexpr int64_t kBlockN = 256;
constexpr int64_t kStagedK = 256;  // depth staged at a time
constexpr int64_t kRowsAhead = 4;  // rows prefetched while staging
// For the bf16 matmul, which packs its operands at each call: large enough to make that a few percent.
constexpr int64_t kMatmulBlockM = 256;
constexpr int64_t kMatmulBlockN = 1024;
// For weight gradients, whose depth is a group's rows: with few of them packing is much of the work.
constexpr int64_t kGradientBlockM = 512;
constexpr int64_t kGradientBlockN = 2048;
// With packed weights: whole rows of C, so many that A stays in the L2 cache.
constexpr int64_t kPackedBlockM = 128;
// Whole tiles of oneDNN's kernels, which are 6 or 8 rows by 16 or 48 columns.
constexpr int64_t kPackedTileM = 8;
constexpr int64_t kTileM = 24;
constexpr int64_t kTileN = 48;

// C[m, n] (+)= op(A) op(B) with depth k: a group's product or a block of it, row-major.
struct Product {
  bool transpose_a, transpose_b;
  bool fp32_c;      // else of the operands' type
  bool accumulate;  // only with fp32_c
  int64_t m, n, k;
  int64_t lda, ldb, ldc;
};

// The whole product of a group.
Product ProductOf(GemmKind kind, int64_t n, int64_t k, const GemmGroup& group) {
  const int64_t rows = group.rows;
  switch (kind) {
    case GemmKind::kForward:
      return {false, true, false, false, rows, n, k, k, k, n};
    case GemmKind::kPacked:
    case GemmKind::kInputGradient:
      return {false, false, false, false, rows, n, k, k, n, n};
    case GemmKind::kWeightGradient:
      break;
  }
  return {true, false, true, !group.overwrite, n, k, rows, n, k, k};
}

constexpr int64_t Ceil(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Pieces of at most `limit`, as equal as whole tiles allow.
int64_t PieceOf(int64_t size, int64_t limit, int64_t tile) {
  return std::min(limit, Ceil(Ceil(size, Ceil(size, limit)), tile) * tile);
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
                                            bool fp32_c, bool accumulate) {
  using dnnl::memory;
  constexpr int64_t kRuntime = DNNL_RUNTIME_DIM_VAL;
  const memory::dims any = {kRuntime, kRuntime};
  const memory::dims plain = {kRuntime, 1}, transposed = {1, kRuntime};
  const memory::desc a(any, memory::data_type::bf16, transpose_a ? transposed : plain);
  const memory::desc b(any, memory::data_type::bf16, transpose_b ? transposed : plain);
  const memory::desc c(any, fp32_c ? memory::data_type::f32 : memory::data_type::bf16, plain);
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
    for (const auto& [gradient, accumulate] : {std::pair{false, false}, {true, false}, {true, true}}) {
      const std::string name = DescribeMatmul(engine, gradient, false, gradient, accumulate).impl_info_str();
      if (name.rfind("ref", 0) == 0) return Bf16Path::kWiden;
    }
    return Bf16Path::kMatmul;
  } catch (const dnnl::error&) {
    return Bf16Path::kWiden;
  }
}

bool PacksWeights(Type type, Bf16Path bf16_path) {
  return (type == Type::kFp32 || bf16_path == Bf16Path::kMatmul) && PackedGemm::Supports(type);
}

namespace {

// A block of an operand in memory.
struct Operand {
  const void* at;
  int64_t rows, width, stride;
};

// Rows of fp32 in scratch are an odd number of cache lines apart. A stride that is a multiple of a large
// power of two would put all rows into the same few cache sets, and sgemm, which reads its operands in place,
// would take up to twice as long.
constexpr int64_t ScratchStride(int64_t width) {
  return Ceil(width, 32) * 32 + 16;
}

// Hidden sizes usually are such a multiple. Copying a block costs a few percent and is worth it from here on.
bool StrideCollides(int64_t stride) {
  return stride % 64 == 0;
}

}  // namespace

struct GroupedGemm::Worker {
  explicit Worker(const Passes* p) : passes(p) {}

  dnnl_status_t Staged(const Product& p, Type type, const void* a, const void* b, void* c);
  const float* Stage(const Operand& operand, Type type, float* scratch, int64_t* stride) const;
  dnnl_status_t Matmul(const Product& p, const void* a, const void* b, void* c);

  const Passes* const passes;
  // Blocks of a and b lie either way round, transposed or not.
  alignas(64) float scratch_a[std::max(kBlockM * ScratchStride(kStagedK), kStagedK* ScratchStride(kBlockM))];
  alignas(64) float scratch_b[std::max(kBlockN * ScratchStride(kStagedK), kStagedK* ScratchStride(kBlockN))];
  alignas(64) float scratch_c[kBlockM * ScratchStride(kBlockN)];
  dnnl::engine engine{dnnl::engine::kind::cpu, 0};
  dnnl::stream stream{engine};
  std::array<std::optional<dnnl::matmul>, 16> matmuls;  // by transpose_a, transpose_b, fp32_c, accumulate
  PackedGemm packed;
};

// The operand as sgemm reads it: in scratch, unless it is fp32 with a harmless stride already.
const float* GroupedGemm::Worker::Stage(const Operand& operand, Type type, float* scratch,
                                        int64_t* stride) const {
  if (type == Type::kFp32 && !StrideCollides(operand.stride)) {
    *stride = operand.stride;
    return static_cast<const float*>(operand.at);
  }
  *stride = ScratchStride(operand.width);
  for (int64_t row = 0; row < operand.rows; ++row) {
    const void* src = At(operand.at, row * operand.stride, type);
    // Rows are short pieces far apart, which the hardware does not foresee.
    const char* ahead = static_cast<const char*>(At(src, kRowsAhead * operand.stride, type));
    if (row + kRowsAhead < operand.rows) {
      for (int64_t byte = 0; byte < operand.width * SizeOf(type); byte += 64)
        __builtin_prefetch(ahead + byte);
    }
    float* dst = scratch + row * *stride;
    if (type == Type::kFp32) {
      std::memcpy(dst, src, operand.width * sizeof(float));
    } else {
      passes->to_fp32(static_cast<const Bf16*>(src), dst, 0, operand.width);
    }
  }
  return scratch;
}

dnnl_status_t GroupedGemm::Worker::Staged(const Product& p, Type type, const void* a, const void* b,
                                          void* c) {
  const bool round_c = type == Type::kBf16 && !p.fp32_c;  // summed in scratch, rounded once
  for (int64_t k0 = 0; k0 < p.k; k0 += kStagedK) {
    Product part = p;
    part.k = std::min(kStagedK, p.k - k0);
    part.accumulate = p.accumulate || k0 > 0;
    if (round_c) part.ldc = ScratchStride(p.n);
    const Operand block_a{At(a, p.transpose_a ? k0 * p.lda : k0, type), p.transpose_a ? part.k : p.m,
                          p.transpose_a ? p.m : part.k, p.lda};
    const Operand block_b{At(b, p.transpose_b ? k0 : k0 * p.ldb, type), p.transpose_b ? p.n : part.k,
                          p.transpose_b ? part.k : p.n, p.ldb};
    const float* fp32_a = Stage(block_a, type, scratch_a, &part.lda);
    const float* fp32_b = Stage(block_b, type, scratch_b, &part.ldb);
    const dnnl_status_t status = Sgemm(part, fp32_a, fp32_b, round_c ? scratch_c : static_cast<float*>(c));
    if (status != dnnl_success) return status;
  }
  if (round_c) {
    for (int64_t row = 0; row < p.m; ++row) {
      passes->to_bf16(scratch_c + row * ScratchStride(p.n), static_cast<Bf16*>(c) + row * p.ldc, 0, p.n);
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
    std::optional<dnnl::matmul>& matmul =
        matmuls[p.transpose_a * 8 + p.transpose_b * 4 + p.fp32_c * 2 + p.accumulate];
    if (!matmul) matmul.emplace(DescribeMatmul(engine, p.transpose_a, p.transpose_b, p.fp32_c, p.accumulate));
    constexpr auto kBf16 = memory::data_type::bf16;
    const memory::dims a_strides = p.transpose_a ? memory::dims{1, p.lda} : memory::dims{p.lda, 1};
    const memory::dims b_strides = p.transpose_b ? memory::dims{1, p.ldb} : memory::dims{p.ldb, 1};
    matmul->execute(
        stream, {{DNNL_ARG_SRC, matrix(p.m, p.k, kBf16, a_strides, a)},
                 {DNNL_ARG_WEIGHTS, matrix(p.k, p.n, kBf16, b_strides, b)},
                 {DNNL_ARG_DST, matrix(p.m, p.n, p.fp32_c ? memory::data_type::f32 : kBf16, {p.ldc, 1}, c)}});
    stream.wait();
    return dnnl_success;
  } catch (const dnnl::error& error) {
    return error.status;
  }
}

GroupedGemm::GroupedGemm(ThreadPool* pool, const Passes* passes, Bf16Path bf16_path)
    : pool_(pool),
      passes_(passes),
      bf16_path_(bf16_path),
      packs_{cpu::PacksWeights(Type::kFp32, bf16_path), cpu::PacksWeights(Type::kBf16, bf16_path)} {
  for (int i = 0; i < pool->num_threads(); ++i) workers_.push_back(std::make_unique<Worker>(passes));
}

GroupedGemm::~GroupedGemm() = default;

absl::string_view GroupedGemm::path() const {
  if (bf16_path_ == Bf16Path::kMatmul) {
    return packs_[1] ? "oneDNN matmul, fp32 sgemm; packed weights: oneDNN matmul"
                     : "oneDNN matmul, fp32 sgemm; weights are not packed";
  }
  return packs_[0] ? "bf16 widened to fp32, oneDNN sgemm; packed weights: fp32, oneDNN matmul"
                   : "bf16 widened to fp32, oneDNN sgemm; weights are not packed";
}

void GroupedGemm::CutIntoBlocks(const Shape& shape, std::span<const GemmGroup> groups) {
  const bool matmul = shape.type == Type::kBf16 && bf16_path_ == Bf16Path::kMatmul;
  int64_t most_m = matmul ? kMatmulBlockM : kBlockM, most_n = matmul ? kMatmulBlockN : kBlockN;
  int64_t tile_m = kTileM;
  if (matmul && shape.kind == GemmKind::kWeightGradient) most_m = kGradientBlockM, most_n = kGradientBlockN;
  if (shape.kind == GemmKind::kPacked) {
    most_m = kPackedBlockM, most_n = shape.n;
    tile_m = kPackedTileM;
  }
  blocks_.clear();
  for (size_t group = 0; group < groups.size(); ++group) {
    if (groups[group].rows == 0) continue;
    const Product p = ProductOf(shape.kind, shape.n, shape.k, groups[group]);
    const int64_t step_m = PieceOf(p.m, most_m, tile_m), step_n = PieceOf(p.n, most_n, kTileN);
    for (int64_t n0 = 0; n0 < p.n; n0 += step_n) {
      for (int64_t m0 = 0; m0 < p.m; m0 += step_m) {
        blocks_.push_back(
            {static_cast<int32_t>(group), m0, std::min(p.m, m0 + step_m), n0, std::min(p.n, n0 + step_n)});
      }
    }
  }
}

int GroupedGemm::Multiply(const Shape& shape, const Block& block, const GemmGroup& group, Worker& worker) {
  const SerialOneDnn serial;
  const Type type = shape.type;
  Product p = ProductOf(shape.kind, shape.n, shape.k, group);
  const void* a = At(group.a, p.transpose_a ? block.m0 : block.m0 * p.lda, type);
  void* c = At(group.c, block.m0 * p.ldc + block.n0, p.fp32_c ? Type::kFp32 : type);
  p.m = block.m1 - block.m0;
  p.n = block.n1 - block.n0;
  if (shape.kind == GemmKind::kPacked) return worker.packed.Multiply({type, p.m, p.n, p.k}, a, group.b, c);
  const void* b = At(group.b, p.transpose_b ? block.n0 * p.ldb : block.n0, type);
  return type == Type::kBf16 && bf16_path_ == Bf16Path::kMatmul ? worker.Matmul(p, a, b, c)
                                                                : worker.Staged(p, type, a, b, c);
}

absl::Status GroupedGemm::Check(const Shape& shape, std::span<const GemmGroup> groups) const {
  if (shape.n < 1 || shape.k < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("grouped GEMM: n is ", shape.n, ", k is ", shape.k, "; allowed: >= 1"));
  if (shape.kind == GemmKind::kPacked &&
      (!PacksWeights(shape.type) || shape.n % kPackedMultiple != 0 || shape.k % kPackedMultiple != 0))
    return absl::InvalidArgumentError(absl::StrCat("grouped GEMM: n is ", shape.n, ", k is ", shape.k,
                                                   " with packed weights; allowed: multiples of ",
                                                   kPackedMultiple, ", on a device that packs the type"));
  for (const GemmGroup& group : groups) {
    if (group.rows < 0 || (group.rows > 0 && (!group.a || !group.b || !group.c)))
      return absl::InvalidArgumentError(absl::StrCat("grouped GEMM: group ", &group - groups.data(), " of ",
                                                     groups.size(), " has ", group.rows,
                                                     " rows or a null matrix; allowed: rows >= 0, no null"));
  }
  return absl::OkStatus();
}

absl::Status GroupedGemm::Run(GemmKind kind, Type type, int64_t n, int64_t k,
                              std::span<const GemmGroup> groups) {
  const Shape shape{kind, type, n, k};
  if (absl::Status status = Check(shape, groups); !status.ok()) return status;
  CutIntoBlocks(shape, groups);
  std::atomic<int> failure{dnnl_success};
  pool_->Run(static_cast<int64_t>(blocks_.size()), [&](int64_t task, int thread) {
    const Block& block = blocks_[task];
    const int status = Multiply(shape, block, groups[block.group], *workers_[thread]);
    if (status != dnnl_success) failure.store(status, std::memory_order_relaxed);
  });
  if (failure != dnnl_success)
    return absl::InternalError(absl::StrCat("grouped GEMM: oneDNN failed with status ", failure.load(), " (",
                                            path(), "; n ", n, ", k ", k, ")"));
  return absl::OkStatus();
}

void GroupedGemm::ForSlices(const Shape& shape, int64_t size,
                            absl::FunctionRef<int(PackedGemm&, int64_t)> reorder) {
  LRMOE_KERNELS_REQUIRE(PacksWeights(shape.type));
  LRMOE_KERNELS_REQUIRE(shape.n % kPackedMultiple == 0 && shape.k % kPackedMultiple == 0);
  pool_->Run(size / kPackedMultiple, [&](int64_t task, int thread) {
    const SerialOneDnn serial;
    // Sizes and pointers are right, so only a lack of memory can fail here, as anywhere.
    LRMOE_KERNELS_REQUIRE(reorder(workers_[thread]->packed, task * kPackedMultiple) == dnnl_success);
  });
}

void GroupedGemm::PackWeights(GemmKind kind, Type type, int64_t n, int64_t k, const void* plain,
                              void* packed) {
  LRMOE_KERNELS_REQUIRE(kind == GemmKind::kForward || kind == GemmKind::kInputGradient);
  ForSlices({kind, type, n, k}, n, [&](PackedGemm& with, int64_t first_n) {
    return with.Pack({kind, type, n, k}, first_n, plain, packed);
  });
}

void GroupedGemm::UnpackWeights(Type type, int64_t n, int64_t k, const void* forward, void* plain) {
  ForSlices({GemmKind::kForward, type, n, k}, n, [&](PackedGemm& with, int64_t first_n) {
    return with.Unpack({GemmKind::kForward, type, n, k}, first_n, forward, plain);
  });
}

void GroupedGemm::RepackWeights(Type type, int64_t n, int64_t k, const void* forward, void* input_gradient) {
  ForSlices({GemmKind::kForward, type, n, k}, k, [&](PackedGemm& with, int64_t first_k) {
    return with.Repack({GemmKind::kForward, type, n, k}, first_k, forward, input_gradient);
  });
}

}  // namespace lrmoe::kernels::cpu
