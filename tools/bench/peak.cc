#include "tools/bench/peak.h"

#include <immintrin.h>

#include <cstdint>

#include "tools/bench/measure.h"

namespace lrmoe::bench {
namespace {

constexpr int kChains = 12;  // latency 4 cycles, two units: 8 are enough, registers allow 12
constexpr int64_t kRounds = 400'000;

// Each returns something that depends on all chains, so that none is removed.
__attribute__((target("avx512f"))) float FmaAvx512() {
  __m512 chain[kChains];
  for (__m512& c : chain) c = _mm512_set1_ps(1.0f);
  const __m512 x = _mm512_set1_ps(0.999999f), y = _mm512_set1_ps(1e-6f);
  for (int64_t i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chain[c] = _mm512_fmadd_ps(chain[c], x, y);
  }
  __m512 sum = chain[0];
  for (int c = 1; c < kChains; ++c) sum = _mm512_add_ps(sum, chain[c]);
  return _mm512_cvtss_f32(sum);
}

// Each multiply-add is of two pairs of numbers per lane.
__attribute__((target("avx512f,avx512bf16"))) float DotBf16() {
  __m512 chain[kChains];
  for (__m512& c : chain) c = _mm512_set1_ps(1.0f);
  const __m512bh x = (__m512bh)_mm512_set1_epi32(0x3A833A83);  // 0.001
  for (int64_t i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chain[c] = _mm512_dpbf16_ps(chain[c], x, x);
  }
  __m512 sum = chain[0];
  for (int c = 1; c < kChains; ++c) sum = _mm512_add_ps(sum, chain[c]);
  return _mm512_cvtss_f32(sum);
}

__attribute__((target("avx2,fma"))) float FmaAvx2() {
  __m256 chain[kChains];
  for (__m256& c : chain) c = _mm256_set1_ps(1.0f);
  const __m256 x = _mm256_set1_ps(0.999999f), y = _mm256_set1_ps(1e-6f);
  for (int64_t i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chain[c] = _mm256_fmadd_ps(chain[c], x, y);
  }
  __m256 sum = chain[0];
  for (int c = 1; c < kChains; ++c) sum = _mm256_add_ps(sum, chain[c]);
  return _mm256_cvtss_f32(sum);
}

float MultiplyAddSse() {
  __m128 chain[kChains];
  for (__m128& c : chain) c = _mm_set1_ps(1.0f);
  const __m128 x = _mm_set1_ps(0.999999f), y = _mm_set1_ps(1e-6f);
  for (int64_t i = 0; i < kRounds; ++i) {
#pragma GCC unroll 12
    for (int c = 0; c < kChains; ++c) chain[c] = _mm_add_ps(_mm_mul_ps(chain[c], x), y);
  }
  __m128 sum = chain[0];
  for (int c = 1; c < kChains; ++c) sum = _mm_add_ps(sum, chain[c]);
  return _mm_cvtss_f32(sum);
}

}  // namespace

Peak MeasurePeak(bool bf16) {
  float (*loop)() = MultiplyAddSse;
  int lanes = 4;
  Peak peak{"sse2", 0};
  if (bf16 && __builtin_cpu_supports("avx512bf16")) {
    loop = DotBf16;
    lanes = 32;
    peak.instructions = "avx512_bf16";
  } else if (__builtin_cpu_supports("avx512f")) {
    loop = FmaAvx512;
    lanes = 16;
    peak.instructions = "avx512f";
  } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
    loop = FmaAvx2;
    lanes = 8;
    peak.instructions = "avx2+fma";
  }
  Timing best;
  volatile float sink = 0;
  for (int run = 0; run < 20; ++run) Measure([&] { sink = loop(); }, best);
  static_cast<void>(sink);
  peak.gflop_per_s = 2.0 * lanes * kChains * kRounds / (best.cpu_ms * 1e6);
  return peak;
}

}  // namespace lrmoe::bench
