// Engines on emulated devices, one each, whose transport reaches their memory.
#pragma once

#include "tests/support/device/engine_checks.h"
#include "tests/support/emulated_cuda.h"
#include "worker/transport/inproc.h"

namespace lrmoe::testing {

inline EngineDevice Emulated(int64_t memory_bytes = emulator::kEmulatedMemoryBytes) {
  return {.make_device = [memory_bytes](int32_t) { return emulator::MakeEmulatedDevice(memory_bytes); },
          .make_transports =
              [](int32_t num_ranks) {
                return transport::CreateInprocGroup(num_ranks,
                                                    [](std::byte* to, const std::byte* from, int64_t bytes) {
                                                      emulator::CopyAnywhere(to, from, bytes);
                                                      return absl::OkStatus();
                                                    });
              }};
}

}  // namespace lrmoe::testing
