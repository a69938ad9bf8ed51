// From what ranks reported to the figures of `lrmoe-bench layer`.
#pragma once

#include <nlohmann/json_fwd.hpp>

#include "tools/bench/layer_run.h"

namespace lrmoe::bench {

// The fixed fields, and for a second arm `against` with the same fields and `ratios` of the first to it.
// Phases are wall time on the critical rank, the one with the longest backward pass in processor time; they
// hold waiting for others where ranks share cores.
nlohmann::json LayerReport(const LayerRun& run, const LayerResult& result);
// Of the ranks whose reports there are: pass times and every kind of exchange, by arm.
nlohmann::json ExchangeReport(const LayerRun& run, const LayerResult& result);
void PrintExchangeReport(const nlohmann::json& report);
void PrintLayerReport(const nlohmann::json& report);

}  // namespace lrmoe::bench
