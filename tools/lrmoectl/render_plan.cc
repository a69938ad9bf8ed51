// plans list, watch, show.
#include <numeric>

#include "absl/strings/str_cat.h"
#include "common/plan_json.h"
#include "common/table.h"
#include "common/units.h"
#include "tools/lrmoectl/json.h"
#include "tools/lrmoectl/render.h"

namespace lrmoe::ctl {
namespace {

int64_t KeptRows(const v1::LayerPlan& plan) {
  return std::accumulate(plan.quota().begin(), plan.quota().end(), int64_t{0});
}

}  // namespace

std::string RenderPlanList(const v1::ListPlansResponse& plans, View view) {
  if (view.json) {
    Json list = Json::array();
    for (const v1::PlanRecord& record : plans.plans()) list.push_back(PlanSummaryJson(record));
    return Dump({{"plans", list}, {"next_page_token", plans.next_page_token()}});
  }
  Table table({{"step"},
               {"layer"},
               {"micro-batch"},
               {"policy", Align::kLeft},
               {"routed rows"},
               {"kept rows"},
               {"retention"},
               {"imbalance before"},
               {"forward"},
               {"backward"},
               {"new replicas"},
               {"planned in"},
               {"", Align::kLeft}});
  for (const v1::PlanRecord& record : plans.plans()) {
    const v1::LayerPlan& plan = record.plan();
    if (!record.error().empty()) {
      table.AddRow({absl::StrCat(plan.invocation().step()), absl::StrCat(plan.invocation().layer()),
                    absl::StrCat(plan.invocation().micro_batch()), "", HumanCount(record.routed_rows()), "",
                    "", "", "", "", "", "", "no plan: " + record.error()},
                   Style::kRed);
      continue;
    }
    std::vector<std::string> cells = {absl::StrCat(plan.invocation().step()),
                                      absl::StrCat(plan.invocation().layer()),
                                      absl::StrCat(plan.invocation().micro_batch()),
                                      plan.policy(),
                                      HumanCount(record.routed_rows()),
                                      HumanCount(KeptRows(plan)),
                                      HumanPercent(plan.retention_rate()),
                                      Fixed(plan.imbalance().before(), 2),
                                      Fixed(plan.imbalance().forward(), 2),
                                      Fixed(plan.imbalance().backward(), 2),
                                      absl::StrCat(plan.new_replicas()),
                                      HumanMicros(plan.plan_us()),
                                      plan.feasible() ? "" : "infeasible"};
    if (plan.feasible()) {
      table.AddRow(std::move(cells));
    } else {
      table.AddRow(std::move(cells), Style::kRed);
    }
  }
  std::string out = table.ToString(view.colour);
  if (plans.plans().empty()) out += "No plans match.\n";
  if (!plans.next_page_token().empty())
    absl::StrAppend(&out, "Older plans: --page-token ", Printable(plans.next_page_token()), "\n");
  return out;
}

std::string RenderPlanLine(const v1::PlanRecord& record, View view) {
  if (view.json) return DumpLine(PlanSummaryJson(record));
  const v1::LayerPlan& plan = record.plan();
  const std::string place =
      absl::StrCat("step ", plan.invocation().step(), "  layer ", plan.invocation().layer(), "  micro-batch ",
                   plan.invocation().micro_batch(), "  ");
  if (!record.error().empty())
    return Styled(absl::StrCat(place, "no plan: ", Printable(record.error())), Style::kRed, view.colour) +
           "\n";
  const std::string line = absl::StrCat(
      place, Printable(plan.policy()), "  kept ", HumanCount(KeptRows(plan)), " of ",
      HumanCount(record.routed_rows()), " rows (", HumanPercent(plan.retention_rate()), ")  imbalance ",
      Fixed(plan.imbalance().before(), 2), " -> ", Fixed(plan.imbalance().backward(), 2), "  ",
      plan.new_replicas(), " new replicas  planned in ", HumanMicros(plan.plan_us()));
  if (plan.feasible()) return line + "\n";
  return Styled(line + "  infeasible", Style::kRed, view.colour) + "\n";
}

std::string RenderPlan(const PlanRecord& record, View view) {
  const LayerPlan& plan = record.plan;
  if (view.json) {
    Json json = PlanToJson(plan);
    json.update(ToJson(plan.invocation));
    json["planned_at_ms"] = record.planned_at_ms;
    return Dump(json);
  }
  std::string out = absl::StrCat(
      "Plan of ", ToString(plan.invocation), "\n\n",
      NameValueLines(
          {{"policy", plan.policy},
           {"planned", absl::StrCat(TimeText(record.planned_at_ms), " in ", HumanMicros(plan.plan_us))},
           {"feasible", plan.feasible ? "yes" : "no: the best that was possible"},
           {"retention", absl::StrCat(HumanPercent(plan.retention_rate), ": ", HumanCount(Sum(plan.quota)),
                                      " of ", HumanCount(Sum(SourceRows(plan))), " rows kept")},
           {"imbalance",
            absl::StrCat(Fixed(plan.imbalance.before, 2), " before, ", Fixed(plan.imbalance.forward, 2),
                         " forward, ", Fixed(plan.imbalance.backward, 2), " backward")},
           {"new replicas", absl::StrCat(plan.new_replicas)},
           {"predicted time", HumanMicros(TotalMicros(plan.predicted_us))}}));
  Table instances(
      {{"expert"}, {"rank"}, {"instance", Align::kLeft}, {"forward rows"}, {"backward rows"}, {"quota"}});
  for (const InstancePlan& instance : plan.instances)
    instances.AddRow(
        {absl::StrCat(instance.expert_idx), absl::StrCat(instance.rank_idx),
         instance.owner    ? "owner"
         : instance.is_new ? "new replica"
                           : "replica",
         HumanCount(instance.forward_rows), HumanCount(instance.backward_rows),
         instance.owner ? HumanCount(plan.quota[static_cast<size_t>(instance.expert_idx)]) : ""});
  Table ranks({{"rank"}, {"forward rows"}, {"backward rows"}, {"memory"}});
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank)
    ranks.AddRow({absl::StrCat(rank), HumanCount(plan.ranks[rank].forward_rows),
                  HumanCount(plan.ranks[rank].backward_rows),
                  HumanBytes(static_cast<double>(plan.ranks[rank].memory_bytes.total()))});
  absl::StrAppend(&out, "\n", instances.ToString(view.colour), "\n", ranks.ToString(view.colour));
  return out;
}

}  // namespace lrmoe::ctl
