// The inner part of a GEMM: operands packed into panels, and a tile of the product kept in registers. Written
// once (gemm_tile_body.h), compiled once per instruction set.
//
// A lane is 32 bits: one fp32 number, or two bf16 numbers that follow each other along the contraction. A
// panel holds `panel` columns of an operand, step after step: [steps][panel] lanes, one step being one lane
// of the contraction; what is missing of the last panel or pair is zero.
#pragma once

#include <cstdint>
#include <span>

namespace lrmoe::kernels::cpu {

struct PackArgs {
  const void* from = nullptr;  // first element
  int64_t stride = 0;          // elements from one stored row to the next
  int64_t depth = 0;           // elements along the contraction, > 0
  int64_t width = 0;           // elements across it, > 0
  void* to = nullptr;          // ceil(width / panel) panels, one after another, 64-byte aligned
};

struct TileArgs {
  const void* a = nullptr;        // lanes; row r, step s at r * a_row + s * a_step
  int64_t a_row = 0, a_step = 0;  // in lanes
  const void* panel = nullptr;    // of b
  int64_t steps = 0;
  int64_t rows = 0;  // 1..max_rows
  float* c = nullptr;
  int64_t c_stride = 0;     // elements
  bool accumulate = false;  // c += instead of c =
  // Cache lines fetched meanwhile, one per step: ahead_lines of each of some stored rows ahead_stride bytes
  // apart.
  const char* ahead = nullptr;
  int64_t ahead_stride = 0;
  int64_t ahead_lines = 1;
};

// How products of one element type are computed.
struct TileOps {
  int64_t element_bytes;   // of the operands
  int64_t depth_per_step;  // 2: bf16 pairs are multiplied as they are; 1: lanes are fp32, bf16 is widened
  int64_t max_rows;        // of a tile
  int64_t panel;           // columns of a tile
  void (*pack_rows)(const PackArgs& args);     // stored [depth, width]
  void (*pack_columns)(const PackArgs& args);  // stored [width, depth]
  void (*tile)(const TileArgs& args);          // c[rows, panel], fp32 sums in order of the steps
};

struct TileSet {
  const char* name;         // "avx512_bf16", ...
  const char* description;  // for the log
  TileOps fp32, bf16;
};

extern const TileSet kBaselineTiles;
extern const TileSet kAvx2Tiles;
extern const TileSet kAvx512Tiles;
extern const TileSet kAvx512Bf16Tiles;

// What this CPU can run, the best one last.
std::span<const TileSet* const> SupportedTiles();

}  // namespace lrmoe::kernels::cpu
