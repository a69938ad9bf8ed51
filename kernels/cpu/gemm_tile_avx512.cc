// GEMM tiles for CPUs with AVX-512 but no bf16 instructions. Headers come before the pragma, see
// passes_avx2.cc.
#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/gemm_tile.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define LRMOE_TILES kAvx512Tiles
#define LRMOE_TILES_NAME "avx512"
#define LRMOE_TILES_DESCRIPTION "fp32: avx512; bf16: widened to fp32, avx512"
#define LRMOE_TILE_LANES 16
#define LRMOE_TILE_ROWS 6
#define LRMOE_TILE_VECTORS 4
#include "kernels/cpu/gemm_tile_body.h"
#pragma GCC pop_options
