// Always-on check of what a caller promised. `kernels` stands alone, so it has its own.
#pragma once

#include <cstdio>
#include <cstdlib>

#define LRMOE_KERNELS_REQUIRE(condition)                                                          \
  do {                                                                                            \
    if (!(condition)) [[unlikely]] {                                                              \
      std::fprintf(stderr, "%s:%d: kernels: caller broke: %s\n", __FILE__, __LINE__, #condition); \
      std::abort();                                                                               \
    }                                                                                             \
  } while (false)
