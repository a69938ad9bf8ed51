// The engine as the worker protocol service sees it.
#pragma once

#include <memory>

#include "absl/status/statusor.h"
#include "worker/engine/engine.h"
#include "worker/rpc/engine_port.h"

namespace lrmoe {

// engine::Engine::Create behind the port; collective. `transport` and `plans` outlive it.
absl::StatusOr<std::unique_ptr<worker::EnginePort>> CreateEngine(
    const engine::EngineOptions& options, transport::Transport* transport, engine::PlanProvider* plans,
    absl::StatusOr<std::unique_ptr<kernels::Device>> device);

}  // namespace lrmoe
