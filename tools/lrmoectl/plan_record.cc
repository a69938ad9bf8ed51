#include "tools/lrmoectl/plan_record.h"

#include <algorithm>
#include <ctime>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "proto/convert.h"
#include "proto/range.h"

namespace lrmoe::ctl {

absl::StatusOr<PlanRecord> FromWire(const v1::PlanRecord& wire) {
  PlanRecord record;
  LRMOE_ASSIGN_OR_RETURN(record.plan, lrmoe::FromWire(wire.plan()));
  record.planned_at_ms = wire.planned_at_ms();
  for (const v1::RankReport& from : wire.reports()) {
    LRMOE_RETURN_IF_ERROR(wire::InRange("reports.rank", from.rank(), 0, kMaxRanks - 1));
    RankReport& to = record.reports.emplace_back();
    to.rank = from.rank();
    LRMOE_ASSIGN_OR_RETURN(to.report, lrmoe::FromWire(from.report()));
  }
  std::stable_sort(record.reports.begin(), record.reports.end(),
                   [](const RankReport& a, const RankReport& b) { return a.rank < b.rank; });
  return record;
}

std::vector<ExpertSummary> SummarizeExperts(const LayerPlan& plan) {
  std::vector<ExpertSummary> experts(plan.quota.size());
  for (size_t idx = 0; idx < experts.size(); ++idx) {
    experts[idx].expert = static_cast<int32_t>(idx);
    experts[idx].quota = plan.quota[idx];
  }
  for (const InstancePlan& instance : plan.instances) {
    ExpertSummary& expert = experts[static_cast<size_t>(instance.expert_idx)];
    expert.routed_rows += instance.forward_rows;
    if (instance.owner) {
      expert.owner = instance.rank_idx;
    } else {
      ++expert.num_replicas;
    }
  }
  return experts;
}

std::vector<int64_t> OwnedRows(const LayerPlan& plan) {
  std::vector<int64_t> rows(plan.ranks.size(), 0);
  for (const ExpertSummary& expert : SummarizeExperts(plan))
    if (expert.owner >= 0) rows[static_cast<size_t>(expert.owner)] += expert.routed_rows;
  return rows;
}

std::vector<int64_t> SourceRows(const LayerPlan& plan) {
  std::vector<int64_t> rows(plan.ranks.size(), 0);
  for (const InstancePlan& instance : plan.instances)
    for (size_t source = 0; source < instance.forward_rows_by_source.size(); ++source)
      rows[source] += instance.forward_rows_by_source[source];
  return rows;
}

int64_t Sum(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{0});
}

double TotalMicros(const PredictedTime& time) {
  return time.weights + time.dispatch + time.compute + time.return_ + time.gradients;
}

double AchievedRetention(const LayerPlan& plan) {
  const int64_t routed = Sum(SourceRows(plan));
  return routed == 0 ? 1.0 : static_cast<double>(Sum(plan.quota)) / static_cast<double>(routed);
}

std::string TimeText(int64_t unix_ms) {
  const std::time_t seconds = static_cast<std::time_t>(unix_ms / 1000);
  std::tm parts{};
  char text[64];
  if (gmtime_r(&seconds, &parts) == nullptr ||
      std::strftime(text, sizeof text, "%Y-%m-%d %H:%M:%S UTC", &parts) == 0)
    return absl::StrCat(unix_ms, " ms of Unix time");
  return text;
}

}  // namespace lrmoe::ctl
