// A plan with what was measured of it, and the figures of it that several views show.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan.h"
#include "common/report.h"
#include "lrmoe/v1/admin.pb.h"

namespace lrmoe::ctl {

struct RankReport {
  int32_t rank = 0;
  InvocationReport report;
};

struct PlanRecord {
  LayerPlan plan;
  int64_t planned_at_ms = 0;        // Unix time
  std::vector<RankReport> reports;  // by rank
};

// InvalidArgument naming the field when the controller sent a plan that is not one.
absl::StatusOr<PlanRecord> FromWire(const v1::PlanRecord& wire);

// One expert in numbers, derived from its instances.
struct ExpertSummary {
  int32_t expert = 0;
  int32_t owner = -1;
  int32_t num_replicas = 0;
  int64_t routed_rows = 0;  // N_e
  int64_t quota = 0;        // K_e
  double kept() const {
    return routed_rows == 0 ? 1.0 : static_cast<double>(quota) / static_cast<double>(routed_rows);
  }
};
std::vector<ExpertSummary> SummarizeExperts(const LayerPlan& plan);

// Routed pairs by the rank that owns their expert: the load under fixed ownership, [G].
std::vector<int64_t> OwnedRows(const LayerPlan& plan);
// Routed pairs by the rank that owns their token, [S].
std::vector<int64_t> SourceRows(const LayerPlan& plan);

int64_t Sum(const std::vector<int64_t>& values);
double TotalMicros(const PredictedTime& time);
// The share of routed pairs with a backward pass; 1 when nothing was routed.
double AchievedRetention(const LayerPlan& plan);

// "2026-11-30 01:40:12 UTC".
std::string TimeText(int64_t unix_ms);

}  // namespace lrmoe::ctl
