// Policy settings of a job: what `lrmoectl policy get|set` shows and changes. Fixed names, see each comment.
#pragma once

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lrmoe {

enum class OnInfeasible : uint8_t { kFail = 1, kBestEffort = 2 };
enum class Selection : uint8_t { kLrm = 1, kGradNorm2 = 2, kGradAbs = 3, kRandom = 4, kLrmSampled = 5 };
// Whether the kept pairs of an expert count for its dropped ones as well.
enum class Rescale : uint8_t { kOff = 1, kRows = 2 };  // rows: N_e / K_e times
enum class RouterGradient : uint8_t { kExact = 1, kRetained = 2 };

struct Policy {
  std::string planner = "lrmoe";  // lrmoe | fixed
  // Candidate retention rates, strictly descending, each in (0, 1]. One value forces it.
  std::vector<double> rates = {1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.55, 0.5};
  double retention_floor = 0.0;     // least K_e / N_e of any expert, 0..1
  double balance_tolerance = 0.01;  // peak load may exceed the mean by this fraction, 0..10
  double window_us =
      std::numeric_limits<double>::infinity();  // communication must fit; > 0; infinity: no limit
  OnInfeasible on_infeasible = OnInfeasible::kFail;
  Selection selection = Selection::kLrm;
  Rescale rescale = Rescale::kOff;  // off with Selection::kLrmSampled, which has weights of its own
  RouterGradient router_gradient = RouterGradient::kExact;
  uint64_t seed = 0;  // for Selection::kRandom and kLrmSampled
  bool operator==(const Policy&) const = default;
};

// InvalidArgument naming the field, its value and the allowed range.
absl::Status Validate(const Policy& policy);

absl::string_view Name(OnInfeasible value);    // fail | best_effort
absl::string_view Name(Selection value);       // lrm | grad_norm2 | grad_abs | random | lrm_sampled
absl::string_view Name(Rescale value);         // off | rows
absl::string_view Name(RouterGradient value);  // exact | retained

// Sets one field from its text form ("rates" takes a comma-separated list, "window_us" takes "inf").
// InvalidArgument for an unknown field (the message lists the known ones) or a bad value; `policy` is then
// unchanged.
absl::Status SetPolicyField(Policy& policy, absl::string_view field, absl::string_view value);
// All fields as (name, text) in a fixed order; SetPolicyField accepts every pair.
std::vector<std::pair<std::string, std::string>> PolicyFields(const Policy& policy);

}  // namespace lrmoe
