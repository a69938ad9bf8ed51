// GEMM tiles for any CPU the compiler knows, and the choice among the sets.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/gemm_tile.h"

#define LRMOE_TILES kBaselineTiles
#define LRMOE_TILES_NAME "baseline"
#define LRMOE_TILES_DESCRIPTION "fp32: vectors of any CPU; bf16: widened to fp32"
#define LRMOE_TILE_LANES 8
#define LRMOE_TILE_ROWS 6
#define LRMOE_TILE_VECTORS 1
#include "kernels/cpu/gemm_tile_body.h"

namespace lrmoe::kernels::cpu {
namespace {

struct Supported {
  Supported() {
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets[count++] = &kAvx2Tiles;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
      sets[count++] = &kAvx512Tiles;
      if (__builtin_cpu_supports("avx512bf16")) sets[count++] = &kAvx512Bf16Tiles;
    }
#endif
  }
  const TileSet* sets[4] = {&kBaselineTiles};
  size_t count = 1;
};

}  // namespace

std::span<const TileSet* const> SupportedTiles() {
  static const Supported supported;
  return {supported.sets, supported.count};
}

}  // namespace lrmoe::kernels::cpu
