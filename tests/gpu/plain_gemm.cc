// The CPU device's grouped GEMM in plain loops instead of oneDNN, so that lrmoe-gpu needs no library of the
// CPU's. Stands in for kernels/cpu/gemm.cc and packed_gemm.cc in run.sh.
#include <algorithm>
#include <vector>

#include "kernels/cpu/gemm.h"
#include "kernels/precondition.h"

namespace lrmoe::kernels::cpu {
namespace {

std::vector<float> ToFloats(const Passes& passes, Type type, const void* values, int64_t count) {
  std::vector<float> out(count);
  if (type == Type::kBf16)
    passes.to_fp32(static_cast<const Bf16*>(values), out.data(), 0, count);
  else
    std::copy_n(static_cast<const float*>(values), count, out.begin());
  return out;
}

// c[m, n] += a[m, k] . b[k, n], row-major.
void Multiply(int64_t m, int64_t n, int64_t k, const float* a, const float* b, float* c) {
  for (int64_t i = 0; i < m; ++i)
    for (int64_t l = 0; l < k; ++l) {
      const float factor = a[i * k + l];
      for (int64_t j = 0; j < n; ++j) c[i * n + j] += factor * b[l * n + j];
    }
}

std::vector<float> Transposed(const std::vector<float>& values, int64_t rows, int64_t columns) {
  std::vector<float> out(values.size());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) out[j * rows + i] = values[i * columns + j];
  return out;
}

void RunGroup(const Passes& passes, GemmKind kind, Type type, int64_t n, int64_t k, const GemmGroup& group) {
  const int64_t rows = group.rows;
  if (kind == GemmKind::kWeightGradient) {
    const std::vector<float> a = ToFloats(passes, type, group.a, rows * n);
    const std::vector<float> b = ToFloats(passes, type, group.b, rows * k);
    if (group.overwrite) std::fill_n(static_cast<float*>(group.c), n * k, 0.0F);
    Multiply(n, k, rows, Transposed(a, rows, n).data(), b.data(), static_cast<float*>(group.c));
    return;
  }
  const std::vector<float> a = ToFloats(passes, type, group.a, rows * k);
  std::vector<float> b = ToFloats(passes, type, group.b, n * k);
  if (kind == GemmKind::kForward) b = Transposed(b, n, k);
  std::vector<float> c(rows * n, 0.0F);
  Multiply(rows, n, k, a.data(), b.data(), c.data());
  if (type == Type::kBf16)
    passes.to_bf16(c.data(), static_cast<Bf16*>(group.c), 0, rows * n);
  else
    std::copy(c.begin(), c.end(), static_cast<float*>(group.c));
}

}  // namespace

struct GroupedGemm::Worker {};

Bf16Path ChooseBf16Path() {
  return Bf16Path::kWiden;
}

bool PacksWeights(Type /*type*/, Bf16Path /*bf16_path*/) {
  return false;
}

GroupedGemm::GroupedGemm(ThreadPool* pool, const Passes* passes, Bf16Path bf16_path)
    : pool_(pool), passes_(passes), bf16_path_(bf16_path), packs_{false, false} {}
GroupedGemm::~GroupedGemm() = default;

absl::string_view GroupedGemm::path() const {
  return bf16_path_ == Bf16Path::kWiden ? "plain loops, bf16 widened to fp32" : "plain loops";
}

absl::Status GroupedGemm::Run(GemmKind kind, Type type, int64_t n, int64_t k,
                              std::span<const GemmGroup> groups) {
  pool_->Run(static_cast<int64_t>(groups.size()), [&](int64_t group, int) {
    if (groups[group].rows > 0) RunGroup(*passes_, kind, type, n, k, groups[group]);
  });
  return absl::OkStatus();
}

// Not to be called of a device that does not pack.
void GroupedGemm::PackWeights(GemmKind, Type, int64_t, int64_t, const void*, void*) {
  LRMOE_KERNELS_REQUIRE(false);
}
void GroupedGemm::UnpackWeights(Type, int64_t, int64_t, const void*, void*) {
  LRMOE_KERNELS_REQUIRE(false);
}
void GroupedGemm::RepackWeights(Type, int64_t, int64_t, const void*, void*) {
  LRMOE_KERNELS_REQUIRE(false);
}

}  // namespace lrmoe::kernels::cpu
