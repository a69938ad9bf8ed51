// Recorded counts on another number of ranks.
#pragma once

#include <cstdint>

#include "common/counts.h"

namespace lrmoe {

// Counts of `num_ranks` (>= 1) sources. The old sources lie end to end and are cut into `num_ranks` equal
// shares: they are split or merged, evenly; what does not divide is dealt out so that no share is favoured.
// Every expert keeps its total.
RoutedCounts RegroupSources(const RoutedCounts& counts, int32_t num_ranks);

}  // namespace lrmoe
