// plans diff: what changed from one plan to another.
#include <algorithm>
#include <cstdlib>
#include <set>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/table.h"
#include "common/units.h"
#include "tools/lrmoectl/json.h"
#include "tools/lrmoectl/render.h"

namespace lrmoe::ctl {
namespace {

constexpr size_t kShownQuotas = 12;  // --output json has all
constexpr size_t kShownReplicas = 64;

// (expert, rank) of every replica, ascending.
using Replicas = std::set<std::pair<int32_t, int32_t>>;

struct Change {
  int32_t expert = 0;
  int64_t before = 0;
  int64_t after = 0;
};

Replicas ReplicasOf(const LayerPlan& plan) {
  Replicas replicas;
  for (const InstancePlan& instance : plan.instances)
    if (!instance.owner) replicas.emplace(instance.expert_idx, instance.rank_idx);
  return replicas;
}

Replicas Minus(const Replicas& from, const Replicas& taken) {
  Replicas rest;
  std::set_difference(from.begin(), from.end(), taken.begin(), taken.end(), std::inserter(rest, rest.end()));
  return rest;
}

// Experts whose quota differs, by expert. An expert that one plan does not have counts as 0 there.
std::vector<Change> QuotaChanges(const LayerPlan& before, const LayerPlan& after) {
  std::vector<Change> changes;
  for (size_t idx = 0; idx < std::max(before.quota.size(), after.quota.size()); ++idx) {
    const Change change{static_cast<int32_t>(idx), idx < before.quota.size() ? before.quota[idx] : 0,
                        idx < after.quota.size() ? after.quota[idx] : 0};
    if (change.before != change.after) changes.push_back(change);
  }
  return changes;
}

const RankPlan& RankOr0(const LayerPlan& plan, size_t rank) {
  static const RankPlan* const none = new RankPlan();
  return rank < plan.ranks.size() ? plan.ranks[rank] : *none;
}

template <typename T>
Json Both(const T& before, const T& after) {
  return {{"before", before}, {"after", after}};
}

Json ReplicasJson(const Replicas& replicas) {
  Json list = Json::array();
  for (const auto& [expert, rank] : replicas) list.push_back({{"expert", expert}, {"rank", rank}});
  return list;
}

Json DiffJson(const LayerPlan& before, const LayerPlan& after) {
  Json quota = Json::array(), ranks = Json::array();
  for (const Change& change : QuotaChanges(before, after))
    quota.push_back({{"expert", change.expert}, {"before", change.before}, {"after", change.after}});
  for (size_t rank = 0; rank < std::max(before.ranks.size(), after.ranks.size()); ++rank) {
    const RankPlan &was = RankOr0(before, rank), &is = RankOr0(after, rank);
    ranks.push_back({{"rank", rank},
                     {"forward_rows", Both(was.forward_rows, is.forward_rows)},
                     {"backward_rows", Both(was.backward_rows, is.backward_rows)},
                     {"memory_bytes", Both(was.memory_bytes.total(), is.memory_bytes.total())}});
  }
  const Replicas was = ReplicasOf(before), is = ReplicasOf(after);
  return {{"before", ToJson(before.invocation)},
          {"after", ToJson(after.invocation)},
          {"policy", Both(before.policy, after.policy)},
          {"feasible", Both(before.feasible, after.feasible)},
          {"retention_rate", Both(before.retention_rate, after.retention_rate)},
          {"routed_rows", Both(Sum(SourceRows(before)), Sum(SourceRows(after)))},
          {"kept_rows", Both(Sum(before.quota), Sum(after.quota))},
          {"imbalance", Both(ToJson(before.imbalance), ToJson(after.imbalance))},
          {"predicted_us", Both(ToJson(before.predicted_us), ToJson(after.predicted_us))},
          {"quota", std::move(quota)},
          {"replicas_added", ReplicasJson(Minus(is, was))},
          {"replicas_removed", ReplicasJson(Minus(was, is))},
          {"ranks", std::move(ranks)}};
}

std::string Signed(int64_t change) {
  return absl::StrCat(change > 0 ? "+" : "", HumanCount(change));
}

std::string SummaryTable(const LayerPlan& before, const LayerPlan& after, bool colour) {
  Table table({{"", Align::kLeft}, {"before"}, {"after"}});
  table.AddRow({"policy", before.policy, after.policy});
  table.AddRow({"feasible", before.feasible ? "yes" : "no", after.feasible ? "yes" : "no"});
  table.AddRow({"retention", HumanPercent(before.retention_rate), HumanPercent(after.retention_rate)});
  table.AddRow({"routed rows", HumanCount(Sum(SourceRows(before))), HumanCount(Sum(SourceRows(after)))});
  table.AddRow({"kept rows", HumanCount(Sum(before.quota)), HumanCount(Sum(after.quota))});
  table.AddRow({"imbalance before", Fixed(before.imbalance.before, 2), Fixed(after.imbalance.before, 2)});
  table.AddRow({"imbalance forward", Fixed(before.imbalance.forward, 2), Fixed(after.imbalance.forward, 2)});
  table.AddRow(
      {"imbalance backward", Fixed(before.imbalance.backward, 2), Fixed(after.imbalance.backward, 2)});
  table.AddRow({"predicted time", HumanMicros(TotalMicros(before.predicted_us)),
                HumanMicros(TotalMicros(after.predicted_us))});
  return table.ToString(colour);
}

std::string ReplicaLine(absl::string_view verb, const Replicas& replicas) {
  if (replicas.empty()) return "";
  std::string out = absl::StrCat("  ", verb, ":");
  size_t shown = 0;
  for (const auto& [expert, rank] : replicas) {
    if (shown == kShownReplicas) return absl::StrCat(out, ", and ", replicas.size() - shown, " more\n");
    absl::StrAppend(&out, shown++ ? ", " : " ", "expert ", expert, " on rank ", rank);
  }
  return out + "\n";
}

std::string ReplicaText(const LayerPlan& before, const LayerPlan& after) {
  const Replicas was = ReplicasOf(before), is = ReplicasOf(after);
  if (was == is)
    return absl::StrCat("  unchanged: ", is.size(), is.size() == 1 ? " replica\n" : " replicas\n");
  return ReplicaLine("added", Minus(is, was)) + ReplicaLine("removed", Minus(was, is));
}

std::string QuotaText(const LayerPlan& before, const LayerPlan& after, bool colour) {
  std::vector<Change> changes = QuotaChanges(before, after);
  if (changes.empty()) return "  unchanged\n";
  std::stable_sort(changes.begin(), changes.end(), [](const Change& a, const Change& b) {
    return std::abs(a.after - a.before) > std::abs(b.after - b.before);
  });
  Table table({{"expert"}, {"before"}, {"after"}, {"change"}});
  for (size_t idx = 0; idx < std::min(changes.size(), kShownQuotas); ++idx)
    table.AddRow({absl::StrCat(changes[idx].expert), HumanCount(changes[idx].before),
                  HumanCount(changes[idx].after), Signed(changes[idx].after - changes[idx].before)});
  std::string out = table.ToString(colour, 2);
  if (changes.size() > kShownQuotas)
    absl::StrAppend(&out, "  and ", changes.size() - kShownQuotas, " more with smaller changes\n");
  return out;
}

std::string RankText(const LayerPlan& before, const LayerPlan& after, bool colour) {
  Table table({{"rank"},
               {"forward before"},
               {"after"},
               {"backward before"},
               {"after"},
               {"memory before"},
               {"after"}});
  for (size_t rank = 0; rank < std::max(before.ranks.size(), after.ranks.size()); ++rank) {
    const RankPlan &was = RankOr0(before, rank), &is = RankOr0(after, rank);
    table.AddRow({absl::StrCat(rank), HumanCount(was.forward_rows), HumanCount(is.forward_rows),
                  HumanCount(was.backward_rows), HumanCount(is.backward_rows),
                  HumanBytes(static_cast<double>(was.memory_bytes.total())),
                  HumanBytes(static_cast<double>(is.memory_bytes.total()))});
  }
  return table.ToString(colour, 2);
}

}  // namespace

std::string DiffPlans(const PlanRecord& before, const PlanRecord& after, View view) {
  const LayerPlan &was = before.plan, &is = after.plan;
  if (view.json) return Dump(DiffJson(was, is));
  std::string out = absl::StrCat("From the plan of ", ToString(was.invocation), "\nto the plan of   ",
                                 ToString(is.invocation), "\n\n", SummaryTable(was, is, view.colour));
  if (was.quota.size() != is.quota.size() || was.ranks.size() != is.ranks.size())
    absl::StrAppend(&out, "The plans are for ", was.quota.size(), " experts on ", was.ranks.size(),
                    " ranks and ", is.quota.size(), " experts on ", is.ranks.size(),
                    " ranks; what one lacks counts as 0.\n");
  absl::StrAppend(&out, "\n", Styled("Replicas", Style::kBold, view.colour), "\n", ReplicaText(was, is), "\n",
                  Styled("Quotas", Style::kBold, view.colour), "\n", QuotaText(was, is, view.colour), "\n",
                  Styled("Rows and memory", Style::kBold, view.colour), "\n", RankText(was, is, view.colour));
  return out;
}

}  // namespace lrmoe::ctl
