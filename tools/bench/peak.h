// The most floating-point work this machine does: independent multiply-adds on registers.
#pragma once

namespace lrmoe::bench {

struct Peak {
  const char* instructions;  // "avx512_bf16", "avx512f", "avx2+fma", "sse2"
  double gflop_per_s;        // one thread, per second of CPU time
};

// Of products of bf16 numbers where the machine has instructions for them, else of fp32 numbers.
Peak MeasurePeak(bool bf16);

}  // namespace lrmoe::bench
