// A fake machine of its own for each test, on which nothing may be left in the end.
#pragma once

#include <catch2/catch.hpp>

#include "tests/support/fake_cuda/fake_cuda.h"

namespace lrmoe::fake_cuda {

inline void RequireNothingLeft() {
  const Live live = CountLive();
  CAPTURE(live.streams, live.events, live.device_allocations, live.pinned, live.reservations,
          live.blas_handles, live.communicators, live.opened);
  REQUIRE(live == Live{});
}

struct FreshMachine {
  FreshMachine() { Reset(); }
  ~FreshMachine() noexcept(false) { RequireNothingLeft(); }
};

}  // namespace lrmoe::fake_cuda
