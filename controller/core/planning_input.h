// From what ranks said of themselves to what the planner wants to know.
#pragma once

#include <cstdint>
#include <vector>

#include "common/cluster.h"
#include "common/layer_shape.h"
#include "common/memory_model.h"
#include "common/policy.h"
#include "common/session.h"

namespace lrmoe::core {

// One entry per rank. Nodes are numbered in the order of their names. Memory: every layer gets an equal share
// of the rank's budget, and its experts, replicas, saved state and buffers are all charged to that share; 0
// is unlimited. A service rate nobody measured is the mean of the measured ones, else the default; the
// bandwidths are the lowest that any rank measured, else the defaults.
Cluster ClusterOf(const std::vector<Hello>& hellos, int32_t num_layers);

// `hello`: of any rank; all say the same of activations.
MemoryModelOptions MemoryModelOf(const LayerShape& shape, const Policy& policy, const Hello& hello);

}  // namespace lrmoe::core
