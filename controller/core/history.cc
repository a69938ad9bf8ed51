#include "controller/core/history.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "common/check.h"
#include "controller/core/plan_content.h"

namespace lrmoe::core {
namespace {

constexpr int64_t kReportBytes = sizeof(InvocationReport) + 48;  // with what the map adds

}  // namespace

History::History(int32_t max_plans, int64_t max_bytes) : max_plans_(max_plans), max_bytes_(max_bytes) {
  LRMOE_CHECK_GE(max_plans, 1);
}

const PlanRecord& History::Add(PlanRecord record) {
  LRMOE_CHECK(record.plan != nullptr);
  record.number = next_number_;
  if (record.error.empty()) ++num_made_;
  if (!record.plan->plan.feasible) ++num_infeasible_;
  Keep(std::move(record));
  return records_.back().record;
}

void History::Restore(PlanRecord record) {
  LRMOE_CHECK(record.plan != nullptr);
  LRMOE_CHECK_GE(record.number, next_number_);
  Keep(std::move(record));
}

void History::RestoreTally(int64_t made, int64_t infeasible) {
  num_made_ = made;
  num_infeasible_ = infeasible;
}

void History::Keep(PlanRecord record) {
  next_number_ = record.number + 1;
  newest_[record.plan->plan.invocation] = record.number;
  const int64_t bytes = ApproximateBytes(record.plan->plan) +
                        static_cast<int64_t>(sizeof(Entry) + record.error.size()) +
                        static_cast<int64_t>(record.reports.size()) * kReportBytes;
  bytes_ += bytes;
  records_.push_back({std::move(record), bytes});
  Trim();
}

const PlanRecord* History::AddReport(int32_t rank_idx, const InvocationReport& report) {
  const auto found = newest_.find(report.invocation);
  if (found == newest_.end()) return nullptr;
  const uint64_t number = found->second;
  Entry* entry = At(number);
  if (entry == nullptr || !entry->record.error.empty()) return nullptr;
  const auto [at, inserted] = entry->record.reports.insert_or_assign(rank_idx, report);
  if (inserted) {
    entry->bytes += kReportBytes;
    bytes_ += kReportBytes;
    Trim();
    entry = At(number);  // it may have been the oldest
  }
  return entry == nullptr ? nullptr : &entry->record;
}

uint64_t History::oldest_number() const {
  return records_.empty() ? next_number_ : records_.front().record.number;
}

void History::Trim() {
  while (records_.size() > max_plans_ || (bytes_ > max_bytes_ && records_.size() > 1)) {
    const Entry& oldest = records_.front();
    const auto newest = newest_.find(oldest.record.plan->plan.invocation);
    if (newest != newest_.end() && newest->second == oldest.record.number) newest_.erase(newest);
    bytes_ -= oldest.bytes;
    records_.pop_front();
  }
}

History::Entry* History::At(uint64_t number) {
  return const_cast<Entry*>(static_cast<const History*>(this)->At(number));
}

const History::Entry* History::At(uint64_t number) const {
  const auto found =
      std::lower_bound(records_.begin(), records_.end(), number,
                       [](const Entry& entry, uint64_t wanted) { return entry.record.number < wanted; });
  return found == records_.end() || found->record.number != number ? nullptr : &*found;
}

const PlanRecord* History::Find(const Invocation& invocation) const {
  const auto found = newest_.find(invocation);
  if (found == newest_.end()) return nullptr;
  const Entry* entry = At(found->second);
  return entry == nullptr ? nullptr : &entry->record;
}

const PlanRecord* History::FindLatest(int32_t layer) const {
  for (auto entry = records_.rbegin(); entry != records_.rend(); ++entry)
    if (entry->record.error.empty() && entry->record.plan->plan.invocation.layer == layer)
      return &entry->record;
  return nullptr;
}

std::vector<const PlanRecord*> History::List(const Filter& filter, bool* more) const {
  std::vector<const PlanRecord*> result;
  *more = false;
  for (auto entry = records_.rbegin(); entry != records_.rend(); ++entry) {
    const PlanRecord& record = entry->record;
    const LayerPlan& plan = record.plan->plan;
    if (record.number >= filter.before_number) continue;
    if (plan.invocation.step < filter.from_step) continue;
    if (filter.to_step.has_value() && plan.invocation.step > *filter.to_step) continue;
    if (filter.layer.has_value() && plan.invocation.layer != *filter.layer) continue;
    if (filter.infeasible_only && plan.feasible) continue;
    if (result.size() == filter.limit) {
      *more = true;
      break;
    }
    result.push_back(&record);
  }
  return result;
}

std::map<int32_t, LayerSummary> History::Layers() const {
  std::map<int32_t, LayerSummary> layers;
  std::map<int32_t, int64_t> counts;
  for (const Entry& entry : records_) {
    if (!entry.record.error.empty()) continue;
    const LayerPlan& plan = entry.record.plan->plan;
    LayerSummary& layer = layers[plan.invocation.layer];
    layer.last = entry.record.plan;
    layer.routed_rows = entry.record.routed_rows;
    layer.mean_retention += plan.retention_rate;
    ++counts[plan.invocation.layer];
  }
  for (auto& [index, layer] : layers) layer.mean_retention /= static_cast<double>(counts[index]);
  return layers;
}

double History::PlanMicroseconds(double q) const {
  std::vector<double> times;
  for (const Entry& entry : records_)
    if (entry.record.error.empty()) times.push_back(entry.record.plan->plan.plan_us);
  if (times.empty()) return 0;
  const auto rank = static_cast<size_t>(std::ceil(q * static_cast<double>(times.size())));
  const size_t position = std::clamp<size_t>(rank, 1, times.size()) - 1;
  std::nth_element(times.begin(), times.begin() + static_cast<std::ptrdiff_t>(position), times.end());
  return times[position];
}

}  // namespace lrmoe::core
