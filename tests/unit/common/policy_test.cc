#include "common/policy.h"

#include <catch2/catch.hpp>

namespace lrmoe {
namespace {

TEST_CASE("every policy field survives its own text form", "[policy]") {
  Policy policy;
  policy.rates = {0.9, 0.123456789012345, 0.1};
  policy.balance_tolerance = 1.0 / 3.0;
  policy.selection = Selection::kRandom;
  policy.rescale = Rescale::kRows;
  policy.seed = 18446744073709551615ULL;
  Policy copy;
  for (const auto& [name, text] : PolicyFields(policy)) REQUIRE(SetPolicyField(copy, name, text).ok());
  CHECK(copy == policy);
}

TEST_CASE("a bad policy value names field, value and range, and changes nothing", "[policy]") {
  Policy policy;
  const Policy before = policy;
  for (auto [field, value, part] : std::vector<std::tuple<const char*, const char*, const char*>>{
           {"planner", "symi", "allowed: lrmoe, fixed"},
           {"rates", "0.5,0.7", "strictly descending"},
           {"rates", "1.5", "(0, 1]"},
           {"rates", "", "a number"},
           {"retention_floor", "-1", "0..1"},
           {"window_us", "0", "> 0"},
           {"rescale", "on", "allowed: off, rows"},
           {"selection", "best", "lrm, grad_norm2, grad_abs, random, lrm_sampled"},
           {"colour", "red", "unknown policy field \"colour\""}}) {
    const absl::Status status = SetPolicyField(policy, field, value);
    CHECK(status.code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(status.message()), Catch::Contains(part));
    CHECK(policy == before);
  }
}

TEST_CASE("rescaling is refused where a selection has weights of its own", "[policy]") {
  Policy policy;
  REQUIRE(SetPolicyField(policy, "rescale", "rows").ok());
  const absl::Status sampled = SetPolicyField(policy, "selection", "lrm_sampled");
  CHECK(sampled.code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(sampled.message()),
             Catch::Contains("rescale is \"rows\"; allowed: off with selection lrm_sampled"));
  CHECK(policy.selection == Selection::kLrm);
  REQUIRE(SetPolicyField(policy, "rescale", "off").ok());
  REQUIRE(SetPolicyField(policy, "selection", "lrm_sampled").ok());
  CHECK_FALSE(SetPolicyField(policy, "rescale", "rows").ok());
}

}  // namespace
}  // namespace lrmoe
