#include "common/policy.h"

#include <cmath>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/status_macros.h"

namespace lrmoe {
namespace {

constexpr absl::string_view kFields =
    "planner, rates, retention_floor, balance_tolerance, window_us, on_infeasible, "
    "selection, rescale, router_gradient, seed";

absl::Status Bad(absl::string_view field, absl::string_view value, absl::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is \"", value, "\"; allowed: ", allowed));
}

// Shortest text that parses back to the same value.
std::string Text(double value) {
  if (std::isinf(value)) return "inf";
  char buffer[32];
  for (int digits = 6; digits <= 17; ++digits) {
    std::snprintf(buffer, sizeof buffer, "%.*g", digits, value);
    double back;
    if (absl::SimpleAtod(buffer, &back) && back == value) break;
  }
  return buffer;
}

absl::Status ParseNumber(absl::string_view field, absl::string_view text, double& out) {
  if (!absl::SimpleAtod(text, &out) || std::isnan(out)) return Bad(field, text, "a number");
  return absl::OkStatus();
}

template <typename Enum>
absl::Status ParseEnum(absl::string_view field, absl::string_view text, std::initializer_list<Enum> all,
                       Enum& out) {
  std::vector<absl::string_view> names;
  for (Enum value : all) {
    if (Name(value) == text) {
      out = value;
      return absl::OkStatus();
    }
    names.push_back(Name(value));
  }
  return Bad(field, text, absl::StrJoin(names, ", "));
}

}  // namespace

absl::string_view Name(OnInfeasible value) {
  return value == OnInfeasible::kFail ? "fail" : "best_effort";
}

absl::string_view Name(Selection value) {
  switch (value) {
    case Selection::kLrm:
      return "lrm";
    case Selection::kGradNorm2:
      return "grad_norm2";
    case Selection::kGradAbs:
      return "grad_abs";
    case Selection::kRandom:
      return "random";
    case Selection::kLrmSampled:
      return "lrm_sampled";
  }
  return "unknown";
}

absl::string_view Name(Rescale value) {
  return value == Rescale::kOff ? "off" : "rows";
}

absl::string_view Name(RouterGradient value) {
  return value == RouterGradient::kExact ? "exact" : "retained";
}

absl::Status Validate(const Policy& policy) {
  if (policy.planner != "lrmoe" && policy.planner != "fixed")
    return Bad("planner", policy.planner, "lrmoe, fixed");
  if (policy.rates.empty() || policy.rates.size() > 1000)
    return Bad("rates", absl::StrCat(policy.rates.size(), " values"), "1..1000 values");
  double previous = std::numeric_limits<double>::infinity();
  for (double rate : policy.rates) {
    if (!(rate > 0.0 && rate <= 1.0)) return Bad("rates", Text(rate), "values in (0, 1]");
    if (!(rate < previous)) return Bad("rates", Text(rate), "strictly descending values");
    previous = rate;
  }
  if (!(policy.retention_floor >= 0.0 && policy.retention_floor <= 1.0))
    return Bad("retention_floor", Text(policy.retention_floor), "0..1");
  if (!(policy.balance_tolerance >= 0.0 && policy.balance_tolerance <= 10.0))
    return Bad("balance_tolerance", Text(policy.balance_tolerance), "0..10");
  if (!(policy.window_us > 0.0)) return Bad("window_us", Text(policy.window_us), "a number > 0, or inf");
  if (policy.rescale != Rescale::kOff && policy.selection == Selection::kLrmSampled)
    return Bad("rescale", Name(policy.rescale),
               "off with selection lrm_sampled, whose weights lose nothing on average already");
  return absl::OkStatus();
}

absl::Status SetPolicyField(Policy& policy, absl::string_view field, absl::string_view value) {
  Policy next = policy;
  if (field == "planner") {
    next.planner = std::string(value);
  } else if (field == "rates") {
    next.rates.clear();
    for (absl::string_view part : absl::StrSplit(value, ','))
      LRMOE_RETURN_IF_ERROR(ParseNumber(field, part, next.rates.emplace_back()));
  } else if (field == "retention_floor") {
    LRMOE_RETURN_IF_ERROR(ParseNumber(field, value, next.retention_floor));
  } else if (field == "balance_tolerance") {
    LRMOE_RETURN_IF_ERROR(ParseNumber(field, value, next.balance_tolerance));
  } else if (field == "window_us") {
    LRMOE_RETURN_IF_ERROR(ParseNumber(field, value, next.window_us));
  } else if (field == "on_infeasible") {
    LRMOE_RETURN_IF_ERROR(
        ParseEnum(field, value, {OnInfeasible::kFail, OnInfeasible::kBestEffort}, next.on_infeasible));
  } else if (field == "selection") {
    LRMOE_RETURN_IF_ERROR(ParseEnum(field, value,
                                    {Selection::kLrm, Selection::kGradNorm2, Selection::kGradAbs,
                                     Selection::kRandom, Selection::kLrmSampled},
                                    next.selection));
  } else if (field == "rescale") {
    LRMOE_RETURN_IF_ERROR(ParseEnum(field, value, {Rescale::kOff, Rescale::kRows}, next.rescale));
  } else if (field == "router_gradient") {
    LRMOE_RETURN_IF_ERROR(
        ParseEnum(field, value, {RouterGradient::kExact, RouterGradient::kRetained}, next.router_gradient));
  } else if (field == "seed") {
    if (!absl::SimpleAtoi(value, &next.seed)) return Bad(field, value, "an integer from 0 to 2^64-1");
  } else {
    return absl::InvalidArgumentError(absl::StrCat("unknown policy field \"", field, "\"; known: ", kFields));
  }
  LRMOE_RETURN_IF_ERROR(Validate(next));
  policy = std::move(next);
  return absl::OkStatus();
}

std::vector<std::pair<std::string, std::string>> PolicyFields(const Policy& policy) {
  return {
      {"planner", policy.planner},
      {"rates",
       absl::StrJoin(policy.rates, ",", [](std::string* out, double rate) { out->append(Text(rate)); })},
      {"retention_floor", Text(policy.retention_floor)},
      {"balance_tolerance", Text(policy.balance_tolerance)},
      {"window_us", Text(policy.window_us)},
      {"on_infeasible", std::string(Name(policy.on_infeasible))},
      {"selection", std::string(Name(policy.selection))},
      {"rescale", std::string(Name(policy.rescale))},
      {"router_gradient", std::string(Name(policy.router_gradient))},
      {"seed", absl::StrCat(policy.seed)},
  };
}

}  // namespace lrmoe
