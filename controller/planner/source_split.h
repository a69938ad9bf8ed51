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

// Local pairs first, then pairs of the same node, then the rest by ascending rank: for the given F no other
// split keeps more pairs local, nor more of the rest on their node.
SourceSplit SplitBySource(const PlanningProblem& problem, const Workload& work, const PlacedRows& placed);

}  // namespace lrmoe::planner
