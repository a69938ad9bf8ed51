// Grouped GEMM: the groups are cut into blocks, the pool's threads take blocks in order, and each thread
// packs the operands of its block and multiplies them tile by tile. Weights are read as they lie, once per
// block of rows: no packed copy is kept. Blocks depend on shapes only, so results do not depend on the thread
// count.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "kernels/cpu/gemm_tile.h"
#include "kernels/cpu/passes.h"
#include "kernels/cpu/thread_pool.h"
#include "kernels/kernels.h"

namespace lrmoe::kernels::cpu {

class GroupedGemm {
 public:
  // `pool`, `passes` and `tiles` outlive this object. Memory: about half a MiB of scratch per thread.
  GroupedGemm(ThreadPool* pool, const Passes* passes, const TileSet* tiles);
  ~GroupedGemm();

  absl::string_view path() const { return tiles_->description; }  // in words, for the log

  // As Device::GroupedGemm.
  absl::Status Run(GemmKind kind, Type type, int64_t n, int64_t k, std::span<const GemmGroup> groups);

 private:
  struct Worker;  // scratch of one thread
  struct Block {  // rows [m0, m1) and columns [n0, n1) of one group's product
    int32_t group;
    int64_t m0, m1, n0, n1;
  };
  void CutIntoBlocks(GemmKind kind, int64_t n, int64_t k, std::span<const GemmGroup> groups);

  ThreadPool* const pool_;
  const TileSet* const tiles_;
  std::vector<std::unique_ptr<Worker>> workers_;  // one per pool thread
  std::vector<Block> blocks_;                     // of the current call
};

}  // namespace lrmoe::kernels::cpu
