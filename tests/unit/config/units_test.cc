#include "common/units.h"

#include <catch2/catch.hpp>
#include <limits>

#include "common/random.h"

namespace lrmoe {
namespace {

using std::chrono::microseconds;

TEST_CASE("sizes", "[units]") {
  CHECK(*ParseBytes("4096") == 4096);
  CHECK(*ParseBytes("4096B") == 4096);
  CHECK(*ParseBytes("512MiB") == 512LL << 20);
  CHECK(*ParseBytes("1.5 KiB") == 1536);
  CHECK(*ParseBytes(" 2GiB ") == 2LL << 30);
  CHECK(*ParseBytes("10MB") == 10'000'000);
  CHECK(*ParseBytes("9223372036854775807") == std::numeric_limits<int64_t>::max());
  for (const char* bad :
       {"", "-1", "MiB", "5 apples", "1.5", "1e3", "9223372036854775808", "8192PiB", "1..5KiB", "0x10"})
    CHECK(ParseBytes(bad).status().code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("durations", "[units]") {
  CHECK(*ParseDuration("250us") == microseconds(250));
  CHECK(*ParseDuration("500 ms") == microseconds(500'000));
  CHECK(*ParseDuration("1.5min") == microseconds(90'000'000));
  CHECK(*ParseDuration("0") == microseconds(0));
  for (const char* bad : {"", "5", "-5s", "s", "5 seconds", "99999999999999h"})
    CHECK(ParseDuration(bad).status().code() == absl::StatusCode::kInvalidArgument);
}

TEST_CASE("exact forms parse back", "[units]") {
  CHECK(ExactBytes(0) == "0");
  CHECK(ExactBytes(1536) == "1536B");
  CHECK(ExactBytes(512 << 20) == "512MiB");
  CHECK(ExactDuration(microseconds(90'000'000)) == "90s");
  Random random(7);
  for (int repeat = 0; repeat < 2000; ++repeat) {
    const int64_t value = static_cast<int64_t>(random.Next() >> 1 >> random.Below(63));
    CHECK(*ParseBytes(ExactBytes(value)) == value);
    CHECK(*ParseDuration(ExactDuration(microseconds(value))) == microseconds(value));
  }
  CHECK(*ParseBytes(ExactBytes(std::numeric_limits<int64_t>::max())) == std::numeric_limits<int64_t>::max());
}

TEST_CASE("forms for people", "[units]") {
  CHECK(HumanBytes(0) == "0 B");
  CHECK(HumanBytes(1023) == "1023 B");
  CHECK(HumanBytes(1536.0 * 1024 * 1024) == "1.50 GiB");
  CHECK(HumanMicros(0) == "0.00 us");
  CHECK(HumanMicros(340) == "340 us");
  CHECK(HumanMicros(1250) == "1.25 ms");
  CHECK(HumanMicros(3.1e6) == "3.10 s");
  CHECK(HumanMicros(std::numeric_limits<double>::infinity()) == "no limit");
  CHECK(HumanCount(0) == "0");
  CHECK(HumanCount(999) == "999");
  CHECK(HumanCount(-1000) == "-1,000");
  CHECK(HumanCount(1234567) == "1,234,567");
  CHECK(HumanPercent(0.875) == "87.5 %");
  CHECK(Fixed(1.005, 2) == "1.00");
}

}  // namespace
}  // namespace lrmoe
