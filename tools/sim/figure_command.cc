// lrmoe-sim fig6, fig7, fig8: the paper's experiments, its figures beside ours.
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/table.h"
#include "common/units.h"
#include "tools/sim/chart.h"
#include "tools/sim/commands.h"
#include "tools/sim/figures.h"

namespace lrmoe::sim {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string plot, output = "table";
  bool no_residents = false;
  FigureOptions figure;
};

// One figure, ready to be shown.
struct Shown {
  std::string title;
  std::vector<std::string> assumptions;
  Json policies = Json::array();
  Table table;
  Drawing drawing{1000, 560, {}};
};

constexpr Frame kWhole = {0, 0, 1000, 560};

// The paper's figure, or nothing where it has none.
std::string PaperText(double value, int decimals) {
  return value > 0 ? Fixed(value, decimals) : "-";
}
Json PaperJson(double value) {
  return value > 0 ? Json(value) : Json(nullptr);
}

template <typename Row>
const Row* Find(const std::vector<Row>& rows, absl::string_view policy) {
  for (const Row& row : rows)
    if (row.policy == policy) return &row;
  return nullptr;
}

absl::StatusOr<Shown> ShowThroughput(const FigureOptions& options, const std::vector<FigureSeed>& seeds) {
  LRMOE_ASSIGN_OR_RETURN(const ThroughputFigure figure, MakeThroughputFigure(options, seeds));
  Shown out{"Figure 6: effective throughput, 16 GiB for token buffers and replicas",

            Assumptions(options, seeds), Json::array(),
            Table({{"policy", Align::kLeft},
                   {"% at 16x"},
                   {"% at 20x"},
                   {"paper"},
                   {"% at 24x"},
                   {"fits up to"},
                   {"retention"},
                   {"replicas"}})};
  out.assumptions.push_back(absl::StrCat("batch: the paper's base of \"512\" per GPU has no unit; 1x is ",
                                         HumanCount(TokensOfUnit()),
                                         " tokens per rank here, so that a perfectly balanced, full batch "
                                         "without replicas fills the 16 GiB at 16x, as "
                                         "the paper's Ideal does"));
  out.assumptions.push_back(
      "a batch fits when the fullest rank's token buffers and replicas do; lrmoe, proportional and waterfill "
      "may "
      "drop backward rows (candidates 1.0 to 0.5), the others keep all; forward is always complete. "
      "Retention and "
      "replicas are those at 20x, or at the largest batch that fits");
  LineChart chart{out.title, "batch multiplier", "effective throughput, %", {}, true, kIdealLimit};
  const auto at = [&](const ThroughputRow& row, double multiplier) {
    for (size_t i = 0; i < figure.multipliers.size(); ++i)
      if (figure.multipliers[i] == multiplier) return row.percent[i];
    return 0.0;
  };
  for (const ThroughputRow& row : figure.rows) {
    out.table.AddRow({row.policy, Fixed(at(row, 16), 1), Fixed(at(row, 20), 1),
                      PaperText(row.paper_percent, 1), Fixed(at(row, 24), 1),
                      Fixed(row.largest_multiplier, 2) + "x", HumanPercent(row.retention),
                      Fixed(row.replicas, 1)});
    out.policies.push_back({{"policy", row.policy},
                            {"paper_percent_at_20x", PaperJson(row.paper_percent)},
                            {"percent_at_20x", at(row, kComparedMultiplier)},
                            {"largest_multiplier", row.largest_multiplier},
                            {"retention_rate", row.retention},
                            {"replicas", row.replicas},
                            {"multipliers", figure.multipliers},
                            {"percent", row.percent}});
    LineChart::Line line{row.policy, {}};
    for (size_t i = 0; i < figure.multipliers.size(); ++i)
      line.points.push_back({figure.multipliers[i], row.percent[i]});
    chart.lines.push_back(std::move(line));
  }
  DrawLines(chart, kWhole, out.drawing);
  return out;
}

absl::StatusOr<Shown> ShowMemory(const FigureOptions& options, const std::vector<FigureSeed>& seeds) {
  LRMOE_ASSIGN_OR_RETURN(const std::vector<MemoryRow> rows, MakeMemoryFigure(options, seeds));
  Shown out{"Figure 7: memory of the fullest rank, one layer",

            Assumptions(options, seeds), Json::array(),
            Table({{"policy", Align::kLeft},
                   {"experts GiB"},
                   {"replicas"},
                   {"token buffers"},
                   {"total"},
                   {"paper"},
                   {"of fixed"},
                   {"paper"}})};
  out.assumptions.push_back(absl::StrCat("lrmoe, proportional and waterfill keep ",
                                         HumanPercent(options.retention),
                                         " of the backward rows, the paper's C30; the others keep all"));
  out.assumptions.push_back(
      "token buffers: the largest stage of an invocation, saved state included. The paper's bar of SYMI "
      "equals "
      "fixed ownership's: no spare slots; --replica-slots 0 does the same here");
  const MemoryRow* fixed = Find(rows, "fixed");
  constexpr double kPaperFixed = 12.88;
  BarChart chart{out.title, "GiB", {}, {"experts", "replicas", "token buffers"}, {}, {}, "paper, total"};
  for (const MemoryRow& row : rows) {
    const double ratio = fixed != nullptr ? row.total() / fixed->total() : 0;
    out.table.AddRow({row.policy, Fixed(row.experts_gib, 2), Fixed(row.replicas_gib, 2),
                      Fixed(row.tokens_gib, 2), Fixed(row.total(), 2), PaperText(row.paper_gib, 2),
                      fixed != nullptr ? Fixed(ratio, 3) : "-", PaperText(row.paper_gib / kPaperFixed, 3)});
    out.policies.push_back({{"policy", row.policy},
                            {"paper_gib", PaperJson(row.paper_gib)},
                            {"paper_tokens_gib", PaperJson(row.paper_tokens_gib)},
                            {"experts_gib", row.experts_gib},
                            {"replicas_gib", row.replicas_gib},
                            {"tokens_gib", row.tokens_gib},
                            {"total_gib", row.total()}});
    chart.names.push_back(row.policy);
    chart.values.push_back({row.experts_gib, row.replicas_gib, row.tokens_gib});
    chart.markers.push_back(row.paper_gib);
  }
  DrawBars(chart, kWhole, out.drawing);
  return out;
}

absl::StatusOr<Shown> ShowLatency(const FigureOptions& options, const std::vector<FigureSeed>& seeds) {
  LRMOE_ASSIGN_OR_RETURN(const std::vector<LatencyRow> rows, MakeLatencyFigure(options, seeds));
  Shown out{"Figure 8: backward pass of the slowest rank, one layer",

            Assumptions(options, seeds), Json::array(),
            Table({{"policy", Align::kLeft},
                   {"compute ms"},
                   {"dispatch"},
                   {"combine"},
                   {"total"},
                   {"paper"},
                   {"of fixed"},
                   {"paper"},
                   {"replica gradients"}})};
  out.assumptions.push_back(absl::StrCat("lrmoe, proportional and waterfill keep ",
                                         HumanPercent(options.retention),
                                         " of the backward rows, the paper's C30; the others keep all"));
  out.assumptions.push_back(
      "a row is 12 H F operations and 2 H bytes each way unless it stays on its rank; rows that another "
      "instance "
      "than their forward's runs take x and a along in dispatch. Sums of replica gradients are not among the "
      "paper's components and not in the total. Scoring, selection and packing are not modelled");
  const LatencyRow* fixed = Find(rows, "fixed");
  constexpr double kPaperFixed = 29.64;
  BarChart chart{out.title, "ms", {}, {"compute", "dispatch", "combine"}, {}, {}, "paper, total"};
  for (const LatencyRow& row : rows) {
    const double ratio = fixed != nullptr ? row.total() / fixed->total() : 0;
    out.table.AddRow({row.policy, Fixed(row.compute_ms, 2), Fixed(row.dispatch_ms, 2),
                      Fixed(row.combine_ms, 2), Fixed(row.total(), 2), PaperText(row.paper_ms, 2),
                      fixed != nullptr ? Fixed(ratio, 3) : "-", PaperText(row.paper_ms / kPaperFixed, 3),
                      Fixed(row.gradients_ms, 2)});
    out.policies.push_back({{"policy", row.policy},
                            {"paper_ms", PaperJson(row.paper_ms)},
                            {"compute_ms", row.compute_ms},
                            {"dispatch_ms", row.dispatch_ms},
                            {"combine_ms", row.combine_ms},
                            {"total_ms", row.total()},
                            {"replica_gradients_ms", row.gradients_ms}});
    chart.names.push_back(row.policy);
    chart.values.push_back({row.compute_ms, row.dispatch_ms, row.combine_ms});
    chart.markers.push_back(row.paper_ms);
  }
  DrawBars(chart, kWhole, out.drawing);
  return out;
}

using Show = absl::StatusOr<Shown> (*)(const FigureOptions& options, const std::vector<FigureSeed>& seeds);

absl::Status Run(Options options, int figure, Show show) {
  if (!options.plot.empty()) LRMOE_RETURN_IF_ERROR(CheckPlotPath(options.plot));
  options.figure.keep_residents = !options.no_residents;
  LRMOE_ASSIGN_OR_RETURN(const std::vector<FigureSeed> seeds, SolveSeeds(options.figure));
  LRMOE_ASSIGN_OR_RETURN(const Shown shown, show(options.figure, seeds));
  if (!options.plot.empty()) LRMOE_RETURN_IF_ERROR(WriteDrawing(shown.drawing, options.plot));
  if (options.output == "json") {
    const Json json = {{"figure", figure},
                       {"title", shown.title},
                       {"assumptions", shown.assumptions},
                       {"compute_tflop_per_s", ComputeTflops()},
                       {"link_gb_per_s", LinkGbPerS()},
                       {"imbalance", options.figure.imbalance},
                       {"replica_slots", options.figure.replica_slots},
                       {"policies", shown.policies}};
    std::cout << json.dump(2) << "\n";
    return absl::OkStatus();
  }
  std::cout << shown.title << "\n\n" << shown.table.ToString(false) << "\nassumptions\n";
  for (const std::string& line : shown.assumptions) std::cout << "- " << line << "\n";
  return absl::OkStatus();
}

}  // namespace

void AddFigureCommands(CLI::App& app, int& exit_code) {
  const std::tuple<int, const char*, Show> figures[] = {
      {6, "The paper's Figure 6: effective throughput as batches grow", ShowThroughput},
      {7, "The paper's Figure 7: memory of a layer", ShowMemory},
      {8, "The paper's Figure 8: time of a layer's backward pass", ShowLatency}};
  for (const auto& [number, text, show] : figures) {
    const std::string name = absl::StrCat("fig", number);
    auto options = std::make_shared<Options>();
    FigureOptions& figure = options->figure;
    figure.policies = {"all"};
    CLI::App* command = app.add_subcommand(name, text);
    std::vector<std::string> known = ExpandPolicies({"all"});
    known.push_back("all");
    command->add_option("--policies", figure.policies, "Policies, or all")
        ->delimiter(',')
        ->check(CLI::IsMember(known))
        ->capture_default_str();
    command->add_option("--replica-slots", figure.replica_slots, "Per rank, for every policy")
        ->check(CLI::Range(0, 4096))
        ->capture_default_str();
    command->add_option("--imbalance", figure.imbalance, "Of the most loaded rank under fixed ownership")
        ->check(CLI::Range(1.0, 8.0))
        ->capture_default_str();
    command->add_option("--retention", figure.retention, "Of policies that drop, in Figures 7 and 8")
        ->check(CLI::Range(0.01, 1.0))
        ->capture_default_str();
    command->add_option("--seeds", figure.num_seeds, "Workloads to average over")
        ->check(CLI::Range(1, 1000))
        ->capture_default_str();
    command->add_option("--seed", figure.seed, "The first of them")->capture_default_str();
    command->add_flag("--no-residents", options->no_residents, "No replica outlives its invocation");
    command->add_option("--plot", options->plot, "Also draw it: .svg or .png");
    command->add_option("--output", options->output, "Form of the result")
        ->check(CLI::IsMember({"table", "json"}))
        ->capture_default_str();
    command->callback([options, &exit_code, number = number, show = show, name] {
      options->figure.policies = ExpandPolicies(options->figure.policies);
      exit_code = Report(name, Run(*options, number, show));
    });
  }
}

}  // namespace lrmoe::sim
