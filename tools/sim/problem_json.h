// Reads a planning problem, format "lrmoe-planning-problem" version 1. Strict: an unknown or repeated key, a
// wrong type or a value out of range is InvalidArgument naming the field, its value and what is allowed.
#pragma once

#include <string>

#include "absl/status/statusor.h"
#include "controller/planner/problem.h"

namespace lrmoe::sim {

// A problem for the policy of that name; the result has passed planner::Validate. Only counts, owner and
// ranks are required; the rest has the defaults of the structs (memory_bytes and window_us: no limit).
absl::StatusOr<planner::PlanningProblem> ReadProblem(const std::string& text,
                                                     const std::string& planner = "lrmoe");

}  // namespace lrmoe::sim
