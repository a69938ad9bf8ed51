// Grouped GEMM on oneDNN: the groups are cut into blocks of limited size, the pool's threads take blocks in
// order and each block is one serial oneDNN call. Blocks depend on shapes only, so results do not depend on
// the thread count.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kernels.h"

namespace lrmoe::kernels::cpu {

// How bf16 products of plain matrices are computed; fp32 uses oneDNN's sgemm.
enum class Bf16Path : uint8_t {
  kMatmul,  // oneDNN bf16 matmul, fp32 accumulation inside
  kWiden,   // operands of a block widened to fp32 in scratch, sgemm, rounded once
};

// kMatmul when this CPU has bf16 instructions and oneDNN has an optimised bf16 matmul for it.
Bf16Path ChooseBf16Path();
// Whether oneDNN multiplies packed weights of the type faster on this CPU, bf16 computed in that way.
bool PacksWeights(Type type, Bf16Path bf16_path);

class PackedGemm;

class GroupedGemm {
 public:
  // `pool` and `passes` outlive this object. Memory: 0.5 MiB of scratch per thread.
  GroupedGemm(ThreadPool* pool, const Passes* passes, Bf16Path bf16_path);
  ~GroupedGemm();

  absl::string_view path() const;  // in words, for the log

  // As Device::GroupedGemm.
  absl::Status Run(GemmKind kind, Type type, int64_t n, int64_t k, std::span<const GemmGroup> groups);

  // As in Device.
  bool PacksWeights(Type type) const { return packs_[type == Type::kBf16]; }
  void PackWeights(GemmKind kind, Type type, int64_t n, int64_t k, const void* plain, void* packed);
  void UnpackWeights(Type type, int64_t n, int64_t k, const void* forward, void* plain);
  void RepackWeights(Type type, int64_t n, int64_t k, const void* forward, void* input_gradient);

 private:
  struct Worker;  // scratch and primitives of one thread
  struct Block {  // rows [m0, m1) and columns [n0, n1) of one group's product
    int32_t group;
    int64_t m0, m1, n0, n1;
  };
  struct Shape {
    GemmKind kind;
    Type type;
    int64_t n, k;
  };
  void CutIntoBlocks(const Shape& shape, std::span<const GemmGroup> groups);
  absl::Status Check(const Shape& shape, std::span<const GemmGroup> groups) const;
  // A block's product; oneDNN's status.
  int Multiply(const Shape& shape, const Block& block, const GemmGroup& group, Worker& worker);
  // reorder(a thread's PackedGemm, first) for each slice of [0, size); returns oneDNN's status.
  void ForSlices(const Shape& shape, int64_t size, absl::FunctionRef<int(PackedGemm&, int64_t)> reorder);

  ThreadPool* const pool_;
  const Passes* const passes_;
  const Bf16Path bf16_path_;
  const bool packs_[2];                           // fp32, bf16
  std::vector<std::unique_ptr<Worker>> workers_;  // one per pool thread
  std::vector<Block> blocks_;                     // of the current call
};

}  // namespace lrmoe::kernels::cpu
