// lrmoe-sim replay: a trace through policies.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/table.h"
#include "common/units.h"
#include "controller/planner/policies/policies.h"
#include "tools/sim/chart.h"
#include "tools/sim/commands.h"
#include "tools/sim/progress.h"
#include "tools/sim/replay.h"
#include "tools/sim/trace_source.h"

namespace lrmoe::sim {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string trace, plot, output = "table", memory;
  int64_t limit = 0;
  bool no_residents = false, free_transfers = false;
  ReplayOptions replay;
};

// What to say of the sources; empty when the ranks are the sources.
std::string Regrouped(const TraceHeader& header, int32_t num_ranks) {
  if (header.num_source_ranks == num_ranks) return "";
  return absl::StrCat("the trace's ", header.num_source_ranks, " sources were ",
                      header.num_source_ranks > num_ranks ? "merged" : "split", " evenly into ", num_ranks);
}

Json Spread(const Distribution& values) {
  return {{"mean", values.mean()}, {"p95", values.Quantile(0.95)}, {"max", values.max()}};
}

Json Times(const Distribution& values) {
  return {{"p50", values.Quantile(0.5)}, {"p99", values.Quantile(0.99)}, {"max", values.max()}};
}

Json OutcomeToJson(const PolicyOutcome& outcome) {
  return {
      {"policy", outcome.policy},
      {"moves_owners", planner::FindPolicy(outcome.policy)->moves_owners},
      {"invocations", outcome.invocations},
      {"infeasible", outcome.infeasible},
      {"imbalance_forward", Spread(outcome.imbalance_forward)},
      {"imbalance_backward", Spread(outcome.imbalance_backward)},
      {"new_replicas", {{"mean", outcome.new_replicas.mean()}, {"max", outcome.new_replicas.max()}}},
      {"retention_rate", {{"mean", outcome.retention_rate.mean()}, {"min", outcome.retention_rate.min()}}},
      {"plan_us", Times(outcome.plan_us)},
      {"plan_wall_us", Times(outcome.plan_wall_us)},
      {"fan_out", {{"mean", outcome.fan_out.mean()}, {"max", outcome.fan_out.max()}}},
      {"remote_share", {{"mean", outcome.remote_share.mean()}, {"max", outcome.remote_share.max()}}},
      {"predicted_us", {{"mean", outcome.predicted_us.mean()}, {"max", outcome.predicted_us.max()}}},
      {"memory_bytes", {{"mean", outcome.memory_bytes.mean()}, {"max", outcome.memory_bytes.max()}}},
      {"rank_load", {{"mean", outcome.load}, {"max", outcome.peak_load}}}};
}

Json ReplayToJson(const Options& options, const TraceHeader& header, const Replay& replay) {
  Json out = {{"trace", options.trace},
              {"ranks", replay.num_ranks()},
              {"replica_slots", options.replay.rank.replica_slots},
              {"policies", Json::array()},
              {"model", header.model},
              {"source_ranks", header.num_source_ranks},
              {"sources", Regrouped(header, replay.num_ranks())},
              {"balance_tolerance", options.replay.policy.balance_tolerance},
              {"residents_kept", options.replay.keep_residents},
              {"free_transfers", options.free_transfers},
              {"imbalance_before", Spread(replay.imbalance_before())}};
  for (const PolicyOutcome& outcome : replay.outcomes()) out["policies"].push_back(OutcomeToJson(outcome));
  return out;
}

const char* Owners(const std::string& policy) {
  const planner::PolicyInfo& info = *planner::FindPolicy(policy);
  return info.ideal ? "bound" : info.moves_owners ? "move" : "stay";
}

std::string ReplayText(const Options& options, const TraceHeader& header, const Replay& replay) {
  const Distribution& before = replay.imbalance_before();
  std::string out = absl::StrCat(options.trace, ": ", header.model, "\n", HumanCount(replay.invocations()),
                                 " invocations, ", header.num_experts, " experts, top ", header.top_k, ", ",
                                 replay.num_ranks(), " ranks with ", options.replay.rank.replica_slots,
                                 " replica slots each\n");
  const std::string sources = Regrouped(header, replay.num_ranks());
  if (!sources.empty()) absl::StrAppend(&out, sources, "\n");
  absl::StrAppend(&out, "balance tolerance ", HumanPercent(options.replay.policy.balance_tolerance), "; ",
                  options.replay.keep_residents ? "replicas of a layer's last plan are there already"
                                                : "no replica outlives its invocation",
                  options.free_transfers ? "; transfers cost nothing" : "",
                  "\nimbalance before planning: mean ", Fixed(before.mean(), 3), ", p95 ",
                  Fixed(before.Quantile(0.95), 3), ", max ", Fixed(before.max(), 3), "\n\n");
  Table table({{"policy", Align::kLeft},
               {"owners", Align::kLeft},
               {"forward mean"},
               {"p95"},
               {"max"},
               {"backward mean"},
               {"p95"},
               {"max"},
               {"copies"},
               {"max"},
               {"fan-out"},
               {"remote"},
               {"retention"},
               {"min"},
               {"infeasible"},
               {"plan us p50"},
               {"p99"},
               {"max"}});
  for (const PolicyOutcome& o : replay.outcomes()) {
    const auto imbalance = [](double value) { return Fixed(value, 3); };
    table.AddRow({o.policy, Owners(o.policy), imbalance(o.imbalance_forward.mean()),
                  imbalance(o.imbalance_forward.Quantile(0.95)), imbalance(o.imbalance_forward.max()),
                  imbalance(o.imbalance_backward.mean()), imbalance(o.imbalance_backward.Quantile(0.95)),
                  imbalance(o.imbalance_backward.max()), Fixed(o.new_replicas.mean(), 2),
                  Fixed(o.new_replicas.max(), 0), Fixed(o.fan_out.max(), 0),
                  HumanPercent(o.remote_share.mean()), HumanPercent(o.retention_rate.mean()),
                  HumanPercent(o.retention_rate.min()), HumanCount(o.infeasible),
                  Fixed(o.plan_us.Quantile(0.5), 1), Fixed(o.plan_us.Quantile(0.99), 1),
                  Fixed(o.plan_us.max(), 1)});
  }
  out += table.ToString(false);
  return out +
         "\nimbalance: most loaded rank over the mean; copies: new transfers of weights per invocation; "
         "fan-out: most of them from one rank; plan us: processor time of one core\n"
         "owners move: the policy lays out every instance anew, so that an expert's owner need not hold it; "
         "optimizer state that it would have to send along is not counted\n";
}

Drawing ReplayDrawing(const Replay& replay) {
  Drawing drawing{1240, 900, {}};
  LineChart imbalance{
      "imbalance over the invocations", "invocation", "forward, most loaded rank over mean", {}, false, 0};
  LineChart load{"load per rank", "rank", "mean forward rows over the mean rank's", {}, false, 0};
  LineChart retention{"retention over the invocations", "invocation", "retention rate", {}, true, 0};
  BarChart copies{"new copies per invocation", "copies", {}, {"mean"}, {}, {}, "max"};
  for (const PolicyOutcome& outcome : replay.outcomes()) {
    LineChart::Line over{outcome.policy, {}}, ranks{outcome.policy, {}}, kept{outcome.policy, {}};
    for (const Series::Point& p : outcome.imbalance_series.points()) over.points.push_back({p.x, p.mean});
    for (const Series::Point& p : outcome.retention_series.points()) kept.points.push_back({p.x, p.mean});
    for (size_t g = 0; g < outcome.load.size(); ++g)
      ranks.points.push_back({static_cast<double>(g), outcome.load[g]});
    imbalance.lines.push_back(std::move(over));
    load.lines.push_back(std::move(ranks));
    retention.lines.push_back(std::move(kept));
    copies.names.push_back(outcome.policy);
    copies.values.push_back({outcome.new_replicas.mean()});
    copies.markers.push_back(outcome.new_replicas.max());
  }
  DrawLines(imbalance, {0, 0, 620, 450}, drawing);
  DrawLines(load, {620, 0, 620, 450}, drawing);
  DrawBars(copies, {0, 450, 620, 450}, drawing);
  DrawLines(retention, {620, 450, 620, 450}, drawing);
  return drawing;
}

absl::Status Run(Options options) {
  if (!options.plot.empty()) LRMOE_RETURN_IF_ERROR(CheckPlotPath(options.plot));
  if (!options.memory.empty()) {
    LRMOE_ASSIGN_OR_RETURN(options.replay.rank.memory_bytes, ParseBytes(options.memory));
  }
  options.replay.keep_residents = !options.no_residents;
  // A bandwidth at which the weights of the largest expert take no time that counts.
  if (options.free_transfers) options.replay.bandwidth = {1e12, 1e12};
  LRMOE_ASSIGN_OR_RETURN(TraceSource source, TraceSource::Open(options.trace));
  LRMOE_ASSIGN_OR_RETURN(Replay replay, Replay::Create(options.replay, source.header()));
  {
    ProgressBar bar("replay");
    TraceRecord record;
    while (options.limit == 0 || replay.invocations() < options.limit) {
      LRMOE_ASSIGN_OR_RETURN(const bool more, source.Next(record));
      if (!more) break;
      LRMOE_RETURN_IF_ERROR(replay.Add(record));
      const double done = options.limit > 0
                              ? static_cast<double>(replay.invocations()) / static_cast<double>(options.limit)
                              : 0;
      bar.Update(std::max(done, source.Progress()), replay.invocations());
    }
  }
  if (!options.plot.empty()) LRMOE_RETURN_IF_ERROR(WriteDrawing(ReplayDrawing(replay), options.plot));
  std::cout << (options.output == "json" ? ReplayToJson(options, source.header(), replay).dump(2) + "\n"
                                         : ReplayText(options, source.header(), replay));
  return absl::OkStatus();
}

void AddClusterOptions(CLI::App* command, ReplayOptions& replay, std::string& memory) {
  command->add_option("--ranks", replay.num_ranks, "Ranks; by default the trace's sources")
      ->check(CLI::Range(1, 1024));
  command->add_option("--ranks-per-node", replay.ranks_per_node, "Neighbouring ranks on one node")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--replica-slots", replay.rank.replica_slots, "Replicas of a layer per rank")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_option("--memory", memory, "Per rank for one layer, e.g. 16GiB; by default no limit");
  command->add_option("--rows-per-ms", replay.rank.rows_per_ms, "Expert rows a rank serves")
      ->capture_default_str();
  command
      ->add_option("--intra-node-gb-per-s", replay.bandwidth.intra_node_gb_per_s, "Between ranks of a node")
      ->capture_default_str();
  command->add_option("--inter-node-gb-per-s", replay.bandwidth.inter_node_gb_per_s, "Between nodes")
      ->capture_default_str();
  command->add_option("--hidden", replay.model.hidden_size, "Hidden size H")->capture_default_str();
  command->add_option("--intermediate", replay.model.intermediate_size, "Intermediate size F of an expert")
      ->capture_default_str();
}

}  // namespace

void AddReplayCommand(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand("replay", "Run a trace of routed counts through policies");
  command->add_option("--trace", options->trace, "File of format routing-counts or routing-tokens")
      ->required();
  command->add_option("--policies", options->replay.policies, "Policies, or all")
      ->delimiter(',')
      ->capture_default_str();
  AddClusterOptions(command, options->replay, options->memory);
  command->add_option("--tolerance", options->replay.policy.balance_tolerance, "Balance tolerance")
      ->capture_default_str();
  command->add_option("--rates", options->replay.policy.rates, "Candidate retention rates, descending")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--retention-floor", options->replay.policy.retention_floor, "Least rate of an expert")
      ->capture_default_str();
  command->add_option("--window-us", options->replay.policy.window_us, "Communication must fit in it");
  command->add_option("--limit", options->limit, "Invocations at most; 0: all")
      ->check(CLI::Range(int64_t{0}, int64_t{1} << 60));
  command->add_flag("--no-residents", options->no_residents, "No replica outlives its invocation");
  command->add_flag("--free-transfers", options->free_transfers,
                    "Weights travel at no cost: compares balance and copies alone");
  command->add_option("--plot", options->plot, "Also draw load, imbalance, copies, retention: .svg or .png");
  command->add_option("--output", options->output, "Form of the result")
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  command->callback([options, &exit_code] {
    options->replay.policies = ExpandPolicies(options->replay.policies);
    exit_code = Report("replay", Run(*options));
  });
}

}  // namespace lrmoe::sim
