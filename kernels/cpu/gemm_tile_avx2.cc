// GEMM tiles for CPUs with AVX2 and FMA. Headers come before the pragma, see passes_avx2.cc.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/gemm_tile.h"

#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define LRMOE_TILES kAvx2Tiles
#define LRMOE_TILES_NAME "avx2"
#define LRMOE_TILES_DESCRIPTION "fp32: avx2+fma; bf16: widened to fp32, avx2+fma"
#define LRMOE_TILE_LANES 8
#define LRMOE_TILE_ROWS 6
#define LRMOE_TILE_VECTORS 2
#include "kernels/cpu/gemm_tile_body.h"
#pragma GCC pop_options
