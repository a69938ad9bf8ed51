#include "kernels/cpu/gemm.h"

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lrmoe::kernels::cpu {
namespace {

// Limits of a block, in rows, columns and steps. Packed operands and the sums stay in a core's L2 cache (512
// KiB and more) while it works; a packed panel of weights serves up to kBlockM rows.
constexpr int64_t kBlockM = 144;
constexpr int64_t kBlockN = 256;
constexpr int64_t kBlockSteps = 192;
// Whole tiles of every instruction set.
constexpr int64_t kTileM = 6;
constexpr int64_t kTileN = 64;

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

constexpr int64_t Ceil(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}

// Pieces of at most `limit`, as equal as whole tiles allow.
int64_t PieceOf(int64_t size, int64_t limit, int64_t tile) {
  return std::min(limit, Ceil(Ceil(size, Ceil(size, limit)), tile) * tile);
}

const void* At(const void* base, int64_t element, int64_t element_bytes) {
  return static_cast<const char*>(base) + element * element_bytes;
}
void* At(void* base, int64_t element, int64_t element_bytes) {
  return static_cast<char*>(base) + element * element_bytes;
}

// Lanes of an operand as the tiles read them.
struct Lanes {
  const void* at;
  int64_t row, step;  // strides, in lanes
};

// Stored rows that will be packed next.
struct Region {
  const char* at = nullptr;
  int64_t stride = 0, rows = 0, row_bytes = 0;
};

// What the block of b from depth k0 on is packed from; at most one block deep.
Region RegionOf(const TileOps& ops, const Product& p, const void* b, int64_t k0) {
  const int64_t depth = std::min(kBlockSteps * ops.depth_per_step, p.k - k0), size = ops.element_bytes;
  const int64_t rows = p.transpose_b ? p.n : depth, width = p.transpose_b ? depth : p.n;
  const void* at = At(b, p.transpose_b ? k0 : k0 * p.ldb, size);
  return {static_cast<const char*>(at), p.ldb * size, rows, width * size};
}

// Hands a region out to the tiles that are multiplied before it is packed, so that it is in the cache then:
// rows are short pieces far apart, which the hardware does not foresee, and packing alone would wait for
// each.
class Ahead {
 public:
  Ahead(const Region& region, int64_t steps) : left_(region) {
    lines_ = std::max<int64_t>(1, Ceil(region.row_bytes, 64));
    rows_per_tile_ = steps / lines_;
  }
  void AddTo(TileArgs& tile) {
    if (left_.rows <= 0 || rows_per_tile_ == 0) {
      tile.ahead = static_cast<const char*>(tile.panel);  // is there already
      return;
    }
    tile.ahead = left_.at;
    tile.ahead_stride = left_.stride;
    tile.ahead_lines = lines_;
    left_.at += rows_per_tile_ * left_.stride;
    left_.rows -= rows_per_tile_;
  }

 private:
  Region left_;
  int64_t lines_, rows_per_tile_;
};

}  // namespace

struct GroupedGemm::Worker {
  explicit Worker(const Passes* p) : passes(p) {}

  // c of the product's type: bf16 when the operands are and nothing is accumulated. `next`: of the block
  // after.
  void Multiply(const TileOps& ops, const Product& p, const void* a, const void* b, void* c,
                const Region& next);
  Lanes StageA(const TileOps& ops, const Product& p, int64_t k0, int64_t depth, const void* a);
  void MultiplyPacked(const TileOps& ops, const Product& p, int64_t steps, const Lanes& a, float* c,
                      int64_t c_stride, bool accumulate, Ahead ahead);
  void WriteSums(const TileOps& ops, const Product& p, int64_t stride, void* c) const;

  // Rows of staged fp32 are an odd number of cache lines apart: a stride that is a multiple of a large power
  // of two would put all rows into the same few cache sets.
  static constexpr int64_t kStagedStride = kBlockSteps + 16;

  const Passes* const passes;
  alignas(
      64) uint32_t packed_a[std::max(Ceil(kBlockM, kTileN) * kTileN * kBlockSteps, kBlockM* kStagedStride)];
  alignas(64) uint32_t packed_b[kBlockN * kBlockSteps];
  alignas(64) float sums[kBlockM * kBlockN];
};

// Rows of a are read where they lie, unless their elements are no lanes yet.
Lanes GroupedGemm::Worker::StageA(const TileOps& ops, const Product& p, int64_t k0, int64_t depth,
                                  const void* a) {
  if (p.transpose_a) {
    ops.pack_rows({At(a, k0 * p.lda, ops.element_bytes), p.lda, depth, p.m, packed_a});
    return {packed_a, 1, ops.panel};  // of one panel; tiles do not cross panels
  }
  const void* rows = At(a, k0, ops.element_bytes);
  const int64_t elements_per_lane = 4 / ops.element_bytes;
  const bool wide = ops.depth_per_step * ops.element_bytes < 4;  // bf16 in fp32 lanes
  if (!wide && p.lda % elements_per_lane == 0 && depth % elements_per_lane == 0)
    return {rows, p.lda / elements_per_lane, 1};
  for (int64_t row = 0; row < p.m; ++row) {
    const void* from = At(rows, row * p.lda, ops.element_bytes);
    uint32_t* to = packed_a + row * kStagedStride;
    if (wide) {
      passes->to_fp32(static_cast<const Bf16*>(from), reinterpret_cast<float*>(to), 0, depth);
    } else {
      to[depth / elements_per_lane] = 0;  // the partner of the last number of an odd depth
      std::memcpy(to, from, depth * ops.element_bytes);
    }
  }
  return {packed_a, kStagedStride, 1};
}

void GroupedGemm::Worker::MultiplyPacked(const TileOps& ops, const Product& p, int64_t steps, const Lanes& a,
                                         float* c, int64_t c_stride, bool accumulate, Ahead ahead) {
  for (int64_t m = 0; m < p.m;) {
    int64_t rows = std::min(ops.max_rows, p.m - m);
    const uint32_t* tile_a = static_cast<const uint32_t*>(a.at);
    if (p.transpose_a) {
      rows = std::min(rows, ops.panel - m % ops.panel);
      tile_a += m / ops.panel * ops.panel * steps + m % ops.panel;
    } else {
      tile_a += m * a.row;
    }
    for (int64_t n = 0; n < p.n; n += ops.panel) {
      TileArgs tile{tile_a,   a.row,     a.step, packed_b + n * steps, steps, rows, c + m * c_stride + n,
                    c_stride, accumulate};
      ahead.AddTo(tile);
      ops.tile(tile);
    }
    m += rows;
  }
}

void GroupedGemm::Worker::WriteSums(const TileOps& ops, const Product& p, int64_t stride, void* c) const {
  for (int64_t row = 0; row < p.m; ++row) {
    const float* from = sums + row * stride;
    if (p.accumulate) {
      passes->add(static_cast<float*>(c) + row * p.ldc, from, 0, p.n);
    } else if (ops.element_bytes == 2) {
      passes->to_bf16(from, static_cast<Bf16*>(c) + row * p.ldc, 0, p.n);
    } else {
      std::memcpy(static_cast<float*>(c) + row * p.ldc, from, p.n * sizeof(float));
    }
  }
}

void GroupedGemm::Worker::Multiply(const TileOps& ops, const Product& p, const void* a, const void* b,
                                   void* c, const Region& next) {
  // Whole panels of fp32 go straight to their place; bf16 is summed in fp32 aside and rounded once.
  const bool aside = p.n % ops.panel != 0 || (ops.element_bytes == 2 && !p.accumulate);
  const int64_t stride = aside ? Ceil(p.n, ops.panel) * ops.panel : p.ldc;
  float* to = aside ? sums : static_cast<float*>(c);
  const int64_t block_depth = kBlockSteps * ops.depth_per_step;
  for (int64_t k0 = 0; k0 < p.k; k0 += block_depth) {
    const int64_t depth = std::min(block_depth, p.k - k0);
    const Lanes lanes = StageA(ops, p, k0, depth, a);
    if (p.transpose_b) {
      ops.pack_columns({At(b, k0, ops.element_bytes), p.ldb, depth, p.n, packed_b});
    } else {
      ops.pack_rows({At(b, k0 * p.ldb, ops.element_bytes), p.ldb, depth, p.n, packed_b});
    }
    const int64_t steps = Ceil(depth, ops.depth_per_step);
    const Region after = k0 + depth < p.k ? RegionOf(ops, p, b, k0 + depth) : next;
    MultiplyPacked(ops, p, steps, lanes, to, stride, k0 > 0 || (p.accumulate && !aside), Ahead(after, steps));
  }
  if (aside) WriteSums(ops, p, stride, c);
}

GroupedGemm::GroupedGemm(ThreadPool* pool, const Passes* passes, const TileSet* tiles)
    : pool_(pool), tiles_(tiles) {
  for (int i = 0; i < pool->num_threads(); ++i) workers_.push_back(std::make_unique<Worker>(passes));
}

GroupedGemm::~GroupedGemm() = default;

void GroupedGemm::CutIntoBlocks(GemmKind kind, int64_t n, int64_t k, std::span<const GemmGroup> groups) {
  blocks_.clear();
  for (size_t group = 0; group < groups.size(); ++group) {
    if (groups[group].rows == 0) continue;
    const Product p = ProductOf(kind, n, k, groups[group].rows);
    const int64_t step_m = PieceOf(p.m, kBlockM, kTileM);
    const int64_t step_n = PieceOf(p.n, kBlockN, kTileN);
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
  const TileOps& ops = type == Type::kBf16 ? tiles_->bf16 : tiles_->fp32;
  const int64_t size = ops.element_bytes;
  // A block's product and where its part of b begins.
  const auto part_of = [&](const Block& block, const void** b) {
    const GemmGroup& group = groups[block.group];
    Product p = ProductOf(kind, n, k, group.rows);
    *b = At(group.b, p.transpose_b ? block.n0 * p.ldb : block.n0, size);
    p.m = block.m1 - block.m0;
    p.n = block.n1 - block.n0;
    return p;
  };
  const auto num_blocks = static_cast<int64_t>(blocks_.size());
  pool_->Run(num_blocks, [&](int64_t task, int thread) {
    const Block& block = blocks_[task];
    const void* b;
    const Product p = part_of(block, &b);
    // Likely this thread's next one.
    Region next;
    if (const int64_t likely = task + pool_->num_threads(); likely < num_blocks) {
      const void* next_b;
      const Product next_product = part_of(blocks_[likely], &next_b);
      if (next_b != b) next = RegionOf(ops, next_product, next_b, 0);
    }
    const GemmGroup& group = groups[block.group];
    const void* a = At(group.a, p.transpose_a ? block.m0 : block.m0 * p.lda, size);
    void* c = At(group.c, block.m0 * p.ldc + block.n0, p.accumulate ? 4 : size);
    workers_[thread]->Multiply(ops, p, a, b, c, next);
  });
  return absl::OkStatus();
}

}  // namespace lrmoe::kernels::cpu
