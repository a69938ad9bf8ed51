// Values as they lie in the database: the wire's messages, whose fields are only ever added, and which are
// validated when they are read back. Pure; any thread.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/plan.h"
#include "common/report.h"
#include "common/session.h"

namespace lrmoe::store {

std::string ToBytes(const ExecutionPlan& plan);
std::string ToBytes(const InvocationReport& report);
std::string ToBytes(const Hello& hello);
std::string ToBytes(const ModelSpec& model);

// DataLoss when the bytes are not those of a valid value.
absl::StatusOr<ExecutionPlan> PlanOf(absl::string_view bytes);
absl::StatusOr<InvocationReport> ReportOf(absl::string_view bytes);
absl::StatusOr<Hello> HelloOf(absl::string_view bytes);
absl::StatusOr<ModelSpec> ModelOf(absl::string_view bytes);

}  // namespace lrmoe::store
