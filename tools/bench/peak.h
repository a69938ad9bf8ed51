// The most floating-point work this machine does: independent multiply-adds on registers.
#pragma once

namespace lrmoe::bench {

struct Peak {
  const char* instructions;  // "avx512f", "avx2+fma", "sse2"
  double gflop_per_s;        // fp32, one thread, per second of CPU time
};

Peak MeasurePeak();

}  // namespace lrmoe::bench
