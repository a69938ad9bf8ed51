// The exchange that starts every collective operation. Each rank says what it is about to do and whether it
// can; when that differs, or one cannot, every rank returns the same error and nothing has changed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/deadline.h"
#include "common/ids.h"
#include "worker/engine/operation.h"
#include "worker/transport/transport.h"

namespace lrmoe::engine {

struct Proposal {
  Operation operation;
  Invocation invocation;
  std::string arguments;   // whatever must be equal on all ranks, as text for people; may be empty
  int64_t num_tokens = 0;  // of this rank; may differ
  absl::Status status;  // not OK: this rank cannot; its message goes to all ranks, cut to kMaxMessage bytes
};

inline constexpr int kMaxMessage = 400;
inline constexpr int kMaxArguments = 120;  // longer texts are compared whole (by hash), shown cut

struct Agreement {
  std::vector<int64_t> num_tokens;  // [G]
};

// Collective. Errors equal on all ranks: InvalidArgument when ranks disagree (names the first two that differ
// and what each wants); the lowest failing rank's code with "rank N: " before its message. Transport errors
// as they are.
absl::StatusOr<Agreement> Agree(transport::Transport& transport, const Proposal& proposal, Deadline deadline);

}  // namespace lrmoe::engine
