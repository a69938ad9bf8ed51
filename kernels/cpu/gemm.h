// Grouped GEMM on oneDNN: the groups are cut into blocks of fixed size, the pool's threads take blocks in
// order and each block is one serial oneDNN call. Blocks depend on shapes only, so results do not depend on
// the thread count.
#pragma once

#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kernels.h"

namespace lrmoe::kernels::cpu {

// How bf16 products are computed; fp32 always uses oneDNN's sgemm.
enum class Bf16Path : uint8_t {
  kMatmul,  // oneDNN bf16 matmul, fp32 accumulation inside
  kWiden,   // operands of a block widened to fp32 in scratch, sgemm, rounded once
};

// kMatmul when this CPU has bf16 instructions and oneDNN has an optimised bf16 matmul for it.
Bf16Path ChooseBf16Path();

class GroupedGemm {
 public:
  // `pool` and `passes` outlive this object. Memory: 0.5 MiB of scratch per thread.
  GroupedGemm(ThreadPool* pool, const Passes* passes, Bf16Path bf16_path);
  ~GroupedGemm();

  absl::string_view path() const;  // in words, for the log

  // As Device::GroupedGemm.
  absl::Status Run(GemmKind kind, Type type, int64_t n, int64_t k, std::span<const GemmGroup> groups);

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

  ThreadPool* const pool_;
  const Passes* const passes_;
  const Bf16Path bf16_path_;
  std::vector<std::unique_ptr<Worker>> workers_;  // one per pool thread
  std::vector<Block> blocks_;                     // of the current call
};

}  // namespace lrmoe::kernels::cpu
