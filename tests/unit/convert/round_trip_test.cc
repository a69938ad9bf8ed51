// FromWire(ToWire(x)) == x, through bytes.
#include <catch2/catch.hpp>
#include <string>

#include "proto/convert.h"
#include "tests/unit/convert/samples.h"

namespace lrmoe {
namespace {

template <typename Wire, typename T>
absl::StatusOr<T> ThroughBytes(const T& value) {
  Wire wire;
  ToWire(value, &wire);
  std::string bytes;
  REQUIRE(wire.SerializeToString(&bytes));
  Wire back;
  REQUIRE(back.ParseFromString(bytes));
  return FromWire(back);
}

TEST_CASE("worker messages survive the wire") {
  Random random(1);
  for (int i = 0; i < 2000; ++i) {
    const WorkerMessage message = test::RandomWorkerMessage(random);
    const auto back = ThroughBytes<v1::WorkerMessage>(message);
    REQUIRE(back.status() == absl::OkStatus());
    REQUIRE(*back == message);
  }
}

TEST_CASE("controller messages survive the wire") {
  Random random(2);
  for (int i = 0; i < 2000; ++i) {
    const ControllerMessage message = test::RandomControllerMessage(random);
    const auto back = ThroughBytes<v1::ControllerMessage>(message);
    REQUIRE(back.status() == absl::OkStatus());
    REQUIRE(*back == message);
  }
}

TEST_CASE("every policy field survives the wire") {
  Policy policy{.planner = "fixed",
                .rates = {0.9, 1.0 / 3},
                .retention_floor = 0.1,
                .balance_tolerance = 0.3,
                .window_us = 12.5,
                .on_infeasible = OnInfeasible::kBestEffort,
                .selection = Selection::kRandom,
                .rescale = Rescale::kRows,
                .router_gradient = RouterGradient::kRetained,
                .seed = UINT64_MAX};
  const auto back = ThroughBytes<v1::PolicySettings>(policy);
  REQUIRE(back.status() == absl::OkStatus());
  CHECK(*back == policy);
  CHECK(*ThroughBytes<v1::PolicySettings>(Policy{}) == Policy{});
}

TEST_CASE("a reason too long to carry is cut at a character, not refused") {
  std::string reason(4095, 'x');
  reason += "\xC3\xA9 and more";
  const auto back = ThroughBytes<v1::ControllerMessage>(ControllerMessage(Abort{reason}));
  REQUIRE(back.status() == absl::OkStatus());
  CHECK(std::get<Abort>(*back).reason == std::string(4095, 'x'));
  const auto mended =
      ThroughBytes<v1::ControllerMessage>(ControllerMessage(Abort{"a\xFF\xC3\xA9\xED\xA0\x80\xC3"}));
  REQUIRE(mended.status() == absl::OkStatus());
  CHECK(std::get<Abort>(*mended).reason == "a?\xC3\xA9????");
}

}  // namespace
}  // namespace lrmoe
