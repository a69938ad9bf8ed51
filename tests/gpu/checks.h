// What tests/gpu/run.sh runs on a device, and how it is written down.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "tests/support/device/device_checks.h"
#include "worker/transport/transport.h"

namespace lrmoe::gpu {

// Lines of the JSON result; each is one member of its object, without the comma.
using JsonMembers = std::vector<std::string>;
std::string Quoted(const std::string& text);
std::string Number(double value);
// {"a": 1, ...}
std::string Object(const JsonMembers& members);
std::string Array(const std::vector<std::string>& values);

// Transports of several logical ranks on one device.
std::vector<std::unique_ptr<transport::Transport>> Loopback(int32_t num_ranks);

// Kernels, GEMM paths, transports and the engine at EP 1 and logical EP 4; prints a line each. Small: for
// memory checkers. True when all passed.
bool RunChecks(testing::CheckSize size, JsonMembers* json);

// Memory and events of another process: this program, started once more as the other side (ipc-client).
testing::CheckResult CheckIpc();
// That side, over two pipes; returns its exit status.
int RunIpcClient(int in, int out);

// GEMM rates of both paths against one dense GEMM; the layer at the paper's shape for four retention rates.
absl::Status RunBench(JsonMembers* json);

}  // namespace lrmoe::gpu
