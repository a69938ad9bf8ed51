// Names of the engine's collective operations, for agreement, errors and logs.
#pragma once

#include <cstdint>

#include "absl/strings/string_view.h"

namespace lrmoe::engine {

enum class Operation : uint8_t {
  kForward = 1,
  kBackward,
  kDiscard,
  kFinishLoad,
  kOptimizerStep,
  kGradientNorm,
  kZeroGradients,
  kSaveCheckpoint,
  kLoadCheckpoint,
  kFinish,
  kCreate,
  kRefreshReplicas,
};
absl::string_view Name(Operation operation);  // "forward", "optimizer step", ...

}  // namespace lrmoe::engine
