// GEMM tiles for CPUs that multiply pairs of bf16 numbers. Headers come before the pragma, see
// passes_avx2.cc.
#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/gemm_tile.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")
#define LRMOE_TILES kAvx512Bf16Tiles
#define LRMOE_TILES_NAME "avx512_bf16"
#define LRMOE_TILES_DESCRIPTION "fp32: avx512; bf16: dot products of pairs, avx512_bf16"
#define LRMOE_TILE_LANES 16
#define LRMOE_TILE_ROWS 6
#define LRMOE_TILE_VECTORS 4
#define LRMOE_TILE_DOT(sum, a, b) \
  std::bit_cast<V>(_mm512_dpbf16_ps((__m512)(sum), std::bit_cast<__m512bh>(a), std::bit_cast<__m512bh>(b)))
#include "kernels/cpu/gemm_tile_body.h"
#pragma GCC pop_options
