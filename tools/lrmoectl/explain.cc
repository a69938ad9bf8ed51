// plans explain: why this plan, told in the order the planner went.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/table.h"
#include "common/units.h"
#include "tools/lrmoectl/json.h"
#include "tools/lrmoectl/render.h"

namespace lrmoe::ctl {
namespace {

constexpr size_t kShownExperts = 8;    // of each ranking; --output json has all
constexpr size_t kShownReplicas = 64;  // a terminal page or so

struct Story {
  const PlanRecord& record;
  const std::vector<ExpertSummary> experts;
  const std::vector<int64_t> owned;   // rows by owner, [G]
  const std::vector<int64_t> source;  // rows by source, [S]
  const int64_t routed;
  const int64_t kept;
  const bool colour;
};

std::string Heading(absl::string_view text, bool colour) {
  return "\n" + Styled(text, Style::kBold, colour) + "\n";
}

std::string Share(int64_t part, int64_t whole) {
  return HumanPercent(whole == 0 ? 0.0 : static_cast<double>(part) / static_cast<double>(whole));
}

std::string Amount(double value, const std::string& unit) {
  if (unit == "bytes") return HumanBytes(value);
  if (unit == "us") return HumanMicros(value);
  return absl::StrCat(value == std::floor(value) ? Fixed(value, 0) : Fixed(value, 3), unit.empty() ? "" : " ",
                      unit);
}

std::string Plural(int64_t count, absl::string_view noun) {
  return absl::StrCat(HumanCount(count), " ", noun, count == 1 ? "" : "s");
}

std::string Demand(const Story& story) {
  std::vector<ExpertSummary> busiest = story.experts;
  std::stable_sort(busiest.begin(), busiest.end(), [](const ExpertSummary& a, const ExpertSummary& b) {
    return a.routed_rows > b.routed_rows;
  });
  const int64_t idle = std::count_if(busiest.begin(), busiest.end(),
                                     [](const ExpertSummary& expert) { return expert.routed_rows == 0; });
  std::string out = Heading("Demand", story.colour);
  absl::StrAppend(&out, "  ", Plural(story.routed, "row"), " (routed token-expert pairs) from ",
                  Plural(static_cast<int64_t>(story.source.size()), "rank"), " to ",
                  Plural(static_cast<int64_t>(busiest.size()), "expert"), ".\n");
  if (story.routed == 0) return out + "  Nothing was routed, so there was nothing to balance.\n";
  absl::StrAppend(&out, "  Mean ", HumanCount(story.routed / static_cast<int64_t>(busiest.size())),
                  " rows per expert. Most wanted:");
  for (size_t idx = 0; idx < std::min<size_t>(busiest.size(), 3); ++idx)
    absl::StrAppend(&out, idx ? ", " : " ", "expert ", busiest[idx].expert, " with ",
                    HumanCount(busiest[idx].routed_rows), " (", Share(busiest[idx].routed_rows, story.routed),
                    ")");
  absl::StrAppend(&out, ".", idle ? absl::StrCat(" Without any: ", Plural(idle, "expert"), ".") : "", "\n");
  const size_t peak =
      static_cast<size_t>(std::max_element(story.owned.begin(), story.owned.end()) - story.owned.begin());
  absl::StrAppend(&out, "  If every owner ran its own experts' rows, rank ", peak,
                  " would be the busiest with ", HumanCount(story.owned[peak]),
                  " rows: ", Fixed(story.record.plan.imbalance.before, 2), " times the mean.\n");
  return out;
}

std::string Tried(const Story& story) {
  const LayerPlan& plan = story.record.plan;
  Table table({{"retention"}, {"outcome", Align::kLeft}, {"where", Align::kLeft}, {"needed"}, {"available"}});
  for (const RejectedCandidate& rejected : plan.rejected)
    table.AddRow({HumanPercent(rejected.retention_rate), "rejected: " + rejected.constraint, rejected.where,
                  Amount(rejected.needed, rejected.unit), Amount(rejected.available, rejected.unit)});
  table.AddRow({HumanPercent(plan.retention_rate),
                plan.feasible ? "chosen" : "taken although it does not fit", "", "", ""},
               plan.feasible ? Style::kGreen : Style::kRed);
  return Heading("What was tried", story.colour) + table.ToString(story.colour, 2);
}

std::string Chosen(const Story& story) {
  const LayerPlan& plan = story.record.plan;
  int64_t replicas = 0;
  for (const InstancePlan& instance : plan.instances) replicas += instance.owner ? 0 : 1;
  std::string out = Heading("What was chosen", story.colour);
  absl::StrAppend(&out, "  Every row goes forward; ", HumanCount(story.kept), " of ",
                  HumanCount(story.routed), " (", HumanPercent(AchievedRetention(plan)),
                  ") also go backward.\n");
  if (replicas > 0)
    absl::StrAppend(&out, "  ", Plural(replicas, "replica"), ": ", plan.new_replicas,
                    " new, whose weights are copied in; ", replicas - plan.new_replicas, " resident.\n");
  absl::StrAppend(&out, "  Imbalance (busiest rank over the mean): ", Fixed(plan.imbalance.before, 2),
                  " before, ", Fixed(plan.imbalance.forward, 2), " forward, ",
                  Fixed(plan.imbalance.backward, 2), " backward.\n");
  if (!plan.feasible)
    absl::StrAppend(&out,
                    Styled("  No candidate met all limits; this is the best that was possible.", Style::kRed,
                           story.colour),
                    "\n");
  return out;
}

std::string Quotas(const Story& story) {
  std::vector<ExpertSummary> reduced;
  for (const ExpertSummary& expert : story.experts)
    if (expert.quota < expert.routed_rows) reduced.push_back(expert);
  std::stable_sort(reduced.begin(), reduced.end(), [](const ExpertSummary& a, const ExpertSummary& b) {
    return a.routed_rows - a.quota > b.routed_rows - b.quota;
  });
  std::string out = Heading("Quotas", story.colour);
  if (reduced.empty()) return out + "  No expert is reduced: every row has its backward.\n";
  Table table({{"expert"}, {"owner rank"}, {"routed rows"}, {"quota"}, {"dropped"}, {"kept"}});
  for (size_t idx = 0; idx < std::min(reduced.size(), kShownExperts); ++idx) {
    const ExpertSummary& expert = reduced[idx];
    table.AddRow({absl::StrCat(expert.expert), absl::StrCat(expert.owner), HumanCount(expert.routed_rows),
                  HumanCount(expert.quota), HumanCount(expert.routed_rows - expert.quota),
                  HumanPercent(expert.kept())});
  }
  absl::StrAppend(&out, "  ", Plural(static_cast<int64_t>(reduced.size()), "expert"), " of ",
                  story.experts.size(), " keep fewer rows than were routed",
                  reduced.size() > kShownExperts ? "; the most reduced:\n" : ":\n",
                  table.ToString(story.colour, 2));
  return out;
}

std::string Replicas(const Story& story) {
  const LayerPlan& plan = story.record.plan;
  Table table({{"expert"},
               {"owner rank"},
               {"replica on rank"},
               {"weights", Align::kLeft},
               {"forward rows"},
               {"backward rows"}});
  size_t replicas = 0;
  for (const InstancePlan& instance : plan.instances) {
    if (instance.owner || ++replicas > kShownReplicas) continue;
    table.AddRow({absl::StrCat(instance.expert_idx),
                  absl::StrCat(story.experts[static_cast<size_t>(instance.expert_idx)].owner),
                  absl::StrCat(instance.rank_idx), instance.is_new ? "new" : "resident",
                  HumanCount(instance.forward_rows), HumanCount(instance.backward_rows)});
  }
  std::string out = Heading("Replicas", story.colour);
  if (replicas == 0) return out + "  None: every row runs at its expert's owner.\n";
  out += table.ToString(story.colour, 2);
  if (replicas > kShownReplicas)
    absl::StrAppend(&out, "  and ", replicas - kShownReplicas, " more (--output json has all)\n");
  return out;
}

std::string Ranks(const Story& story) {
  const LayerPlan& plan = story.record.plan;
  Table table({{"rank"},
               {"rows sourced"},
               {"owned"},
               {"forward"},
               {"backward"},
               {"experts"},
               {"replicas"},
               {"tokens"},
               {"staging"},
               {"memory"}});
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank) {
    const MemoryBytes& bytes = plan.ranks[rank].memory_bytes;
    table.AddRow(
        {absl::StrCat(rank), HumanCount(story.source[rank]), HumanCount(story.owned[rank]),
         HumanCount(plan.ranks[rank].forward_rows), HumanCount(plan.ranks[rank].backward_rows),
         HumanBytes(static_cast<double>(bytes.experts)), HumanBytes(static_cast<double>(bytes.replicas)),
         HumanBytes(static_cast<double>(bytes.tokens)), HumanBytes(static_cast<double>(bytes.staging)),
         HumanBytes(static_cast<double>(bytes.total()))});
  }
  return Heading("Ranks: rows, and memory of this layer", story.colour) + table.ToString(story.colour, 2);
}

std::string Predicted(const Story& story) {
  const PredictedTime& time = story.record.plan.predicted_us;
  return Heading("Predicted time of the critical rank", story.colour) +
         NameValueLines({{"weights in", HumanMicros(time.weights)},
                         {"dispatch", HumanMicros(time.dispatch)},
                         {"compute", HumanMicros(time.compute)},
                         {"return", HumanMicros(time.return_)},
                         {"gradients", HumanMicros(time.gradients)},
                         {"total", HumanMicros(TotalMicros(time))}},
                        2);
}

std::string Measured(const Story& story) {
  const LayerPlan& plan = story.record.plan;
  std::string out = Heading("Measured", story.colour);
  if (story.record.reports.empty()) return out + "  No rank has reported on this invocation yet.\n";
  Table table({{"rank"},
               {"forward"},
               {"compute"},
               {"backward"},
               {"compute"},
               {"forward rows"},
               {"backward rows"},
               {"moved"},
               {"peak memory"},
               {"predicted"},
               {"score kept"}});
  for (const RankReport& rank : story.record.reports) {
    const InvocationReport& report = rank.report;
    table.AddRow({absl::StrCat(rank.rank), HumanMicros(report.forward.total_ms * 1e3),
                  HumanMicros(report.forward.compute_ms * 1e3), HumanMicros(report.backward.total_ms * 1e3),
                  HumanMicros(report.backward.compute_ms * 1e3), HumanCount(report.forward_rows),
                  HumanCount(report.backward_rows), HumanCount(report.moved_rows),
                  HumanBytes(static_cast<double>(report.peak_bytes)),
                  HumanBytes(static_cast<double>(report.predicted_bytes)),
                  report.total_score > 0 ? HumanPercent(report.kept_score / report.total_score) : "-"});
  }
  out += table.ToString(story.colour, 2);
  if (story.record.reports.size() < plan.ranks.size())
    absl::StrAppend(&out, "  ", story.record.reports.size(), " of ", plan.ranks.size(),
                    " ranks have reported.\n");
  return out;
}

Json ExplainJson(const Story& story) {
  const LayerPlan& plan = story.record.plan;
  Json tried = Json::array(), experts = Json::array(), replicas = Json::array(), ranks = Json::array();
  Json reports = Json::array();
  for (const RejectedCandidate& rejected : plan.rejected) tried.push_back(ToJson(rejected));
  for (const ExpertSummary& expert : story.experts)
    experts.push_back({{"expert", expert.expert},
                       {"owner", expert.owner},
                       {"replicas", expert.num_replicas},
                       {"routed_rows", expert.routed_rows},
                       {"quota", expert.quota}});
  for (const InstancePlan& instance : plan.instances)
    if (!instance.owner)
      replicas.push_back({{"expert", instance.expert_idx},
                          {"rank", instance.rank_idx},
                          {"new", instance.is_new},
                          {"forward_rows", instance.forward_rows},
                          {"backward_rows", instance.backward_rows}});
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank)
    ranks.push_back({{"rank", rank},
                     {"source_rows", story.source[rank]},
                     {"owned_rows", story.owned[rank]},
                     {"forward_rows", plan.ranks[rank].forward_rows},
                     {"backward_rows", plan.ranks[rank].backward_rows},
                     {"memory_bytes", ToJson(plan.ranks[rank].memory_bytes)}});
  for (const RankReport& report : story.record.reports) reports.push_back(ToJson(report));
  Json json = ToJson(plan.invocation);
  json["policy"] = plan.policy;
  json["planned_at_ms"] = story.record.planned_at_ms;
  json["plan_us"] = plan.plan_us;
  json["feasible"] = plan.feasible;
  json["retention_rate"] = plan.retention_rate;
  json["routed_rows"] = story.routed;
  json["kept_rows"] = story.kept;
  json["imbalance"] = ToJson(plan.imbalance);
  json["rejected"] = std::move(tried);
  json["experts"] = std::move(experts);
  json["replicas"] = std::move(replicas);
  json["ranks"] = std::move(ranks);
  json["predicted_us"] = ToJson(plan.predicted_us);
  json["reports"] = std::move(reports);
  return json;
}

}  // namespace

std::string ExplainPlan(const PlanRecord& record, View view) {
  const LayerPlan& plan = record.plan;
  const std::vector<int64_t> owned = OwnedRows(plan);
  const Story story{record,     SummarizeExperts(plan), owned,      SourceRows(plan),
                    Sum(owned), Sum(plan.quota),        view.colour};
  if (view.json) return Dump(ExplainJson(story));
  return absl::StrCat("Plan of ", ToString(plan.invocation), ", made by policy ", Printable(plan.policy),
                      " at ", TimeText(record.planned_at_ms), " in ", HumanMicros(plan.plan_us), "\n",
                      Demand(story), Tried(story), Chosen(story), Quotas(story), Replicas(story),
                      Ranks(story), Predicted(story), Measured(story));
}

}  // namespace lrmoe::ctl
