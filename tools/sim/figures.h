// The paper's Figures 6, 7 and 8 from our planner and models, beside the paper's own numbers.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "tools/sim/figure_workload.h"

namespace lrmoe::sim {

// Effective throughput: the part of the offered batch whose work fits the memory budget. Means over the
// seeds.
struct ThroughputRow {
  std::string policy;
  double paper_percent = 0;       // at 20x; 0: not in the paper
  double largest_multiplier = 0;  // that fits, mean of the seeds
  std::vector<double> percent;    // [multiplier]
  double retention = 0;           // of the rows at 20x, or at the largest that fits
  double replicas = 0;            // on all ranks, there
};
struct ThroughputFigure {
  std::vector<double> multipliers;  // the one of the paper's comparison is 20
  std::vector<ThroughputRow> rows;
};
inline constexpr double kComparedMultiplier = 20;
absl::StatusOr<ThroughputFigure> MakeThroughputFigure(const FigureOptions& options,
                                                      const std::vector<FigureSeed>& seeds);

// GiB of the rank that needs most. Means over seeds and steps.
struct MemoryRow {
  std::string policy;
  double paper_gib = 0, paper_tokens_gib = 0;  // 0: not in the paper
  double experts_gib = 0, replicas_gib = 0, tokens_gib = 0;
  double total() const { return experts_gib + replicas_gib + tokens_gib; }
};
absl::StatusOr<std::vector<MemoryRow>> MakeMemoryFigure(const FigureOptions& options,
                                                        const std::vector<FigureSeed>& seeds);

// Milliseconds of the rank with the longest backward pass. Means over seeds and steps.
struct LatencyRow {
  std::string policy;
  double paper_ms = 0;  // 0: not in the paper
  double compute_ms = 0, dispatch_ms = 0, combine_ms = 0;
  double gradients_ms = 0;  // sums of replica gradients: not among the paper's components, not in total()
  double total() const { return compute_ms + dispatch_ms + combine_ms; }
};
absl::StatusOr<std::vector<LatencyRow>> MakeLatencyFigure(const FigureOptions& options,
                                                          const std::vector<FigureSeed>& seeds);
// Of one plan. Kept rows follow the plan's split of forward rows; rows that another instance executes take
// their saved state along, as many as are expected when every row is as likely to be kept. A rank's links are
// full duplex.
LatencyRow BackwardTime(const PlannedStep& step);

}  // namespace lrmoe::sim
