// Which source's pairs each instance executes, and what that sends over the links.
#pragma once

#include <cstdint>
#include <vector>

#include "controller/planner/placed_rows.h"
#include "controller/planner/problem.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

// Forward rows that cross links, per rank.
struct LinkRows {
  std::vector<int64_t> sent_on_node, sent_off_node;          // as a source, [G]
  std::vector<int64_t> received_on_node, received_off_node;  // as an executor, [G]
};

struct SourceSplit {
  std::vector<std::vector<int64_t>> by_source;  // [I][S], sums to F of the instance
  LinkRows links;
};

// How the pairs of the sources meet the rows of an expert's instances. What a rule leaves over is matched in
// ascending order of sources and ranks.
enum class SplitRule : uint8_t {
  // Local pairs, then pairs of the same node: for the given F no other split keeps more pairs local, nor more
  // of the rest on their node.
  kLocalFirst,
  kLocalThenProportional,  // local pairs, then every source shares in proportion to what the instances lack
  kProportional,           // every source shares in proportion to F
  kSourceOrder,            // no regard to locality
};

SourceSplit SplitBySource(const PlanningProblem& problem, const Workload& work, const PlacedRows& placed,
                          SplitRule rule = SplitRule::kLocalFirst);

}  // namespace lrmoe::planner
