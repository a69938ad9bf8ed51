// When ranks exchange rows while they compute.
#include "worker/overlap_choice.h"

#include <catch2/catch.hpp>

namespace lrmoe {

TEST_CASE(
    "overlap: auto wants a spare core or a device, the setting decides otherwise, one rank has no use") {
  struct Case {
    const char* setting;
    OverlapFacts facts;
    bool wanted;
    const char* reason;
  };
  const Case cases[] = {
      {"auto", {4, false, 8, 7}, true, "8 cores and 7 compute threads"},
      {"auto", {4, false, 8, 8}, false, "8 cores and 8 compute threads"},
      {"auto", {4, false, 1, 1}, false, "1 core and 1 compute thread"},
      {"auto", {4, false, 2, 9}, false, "2 cores and 9"},
      {"auto", {4, true, 1, 1}, true, "devices"},
      {"on", {2, false, 1, 1}, true, "overlap is on"},
      {"off", {2, false, 9, 1}, false, "overlap is off"},
      {"off", {2, true, 9, 1}, false, "overlap is off"},
      {"auto", {1, false, 9, 1}, false, "one rank"},
      {"on", {1, false, 9, 1}, false, "one rank"},
  };
  for (const Case& c : cases) {
    std::string reason;
    CAPTURE(c.setting, c.facts.num_ranks, c.facts.cores, c.facts.threads);
    CHECK(ChooseOverlap(c.setting, c.facts, &reason) == c.wanted);
    CHECK_THAT(reason, Catch::Contains(c.reason));
  }
}

}  // namespace lrmoe
