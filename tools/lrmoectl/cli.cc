#include "tools/lrmoectl/cli.h"

#include <algorithm>
#include <ostream>

#include "CLI/App.hpp"
#include "CLI/Config.hpp"
#include "CLI/Formatter.hpp"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/config.h"
#include "common/status_macros.h"
#include "common/units.h"
#include "common/version.h"
#include "proto/convert.h"
#include "tools/lrmoectl/client.h"
#include "tools/lrmoectl/options.h"

namespace lrmoe::ctl {
namespace {

using std::chrono::milliseconds;

// Leads out of CLI11's parser; Run catches it.
[[noreturn]] void Refuse(const std::string& message) {
  throw CLI::ValidationError(message);
}

int64_t ParseInt(absl::string_view field, absl::string_view text, int64_t min, int64_t max) {
  int64_t value;
  if (!absl::SimpleAtoi(text, &value) || value < min || value > max)
    Refuse(absl::StrCat(field, " is \"", text, "\"; allowed: an integer, ", min, "..", max));
  return value;
}

// Text that is sent on: what a message and a terminal can carry.
void CheckText(absl::string_view field, absl::string_view text) {
  for (const char c : text)
    if (!absl::ascii_isprint(static_cast<unsigned char>(c)))
      Refuse(absl::StrCat(field, " is \"", absl::CHexEscape(text), "\"; allowed: printable ASCII"));
}

template <typename Target>
CLI::Option* AddInt(CLI::App* app, const std::string& flag, Target* target, int64_t min, int64_t max,
                    const std::string& doc) {
  return app
      ->add_option_function<std::string>(
          flag, [=](const std::string& text) { *target = ParseInt(flag, text, min, max); }, doc)
      ->type_name("N");
}

template <typename Target>
void AddDuration(CLI::App* app, const std::string& flag, Target* target, const std::string& doc) {
  constexpr milliseconds kMax = std::chrono::hours(24 * 365);
  app->add_option_function<std::string>(
         flag,
         [=](const std::string& text) {
           const absl::StatusOr<std::chrono::microseconds> value = ParseDuration(text);
           if (!value.ok() || *value < milliseconds(1) || *value > kMax)
             Refuse(absl::StrCat(flag, " is \"", text, "\"; allowed: a duration like 500ms or 5s, 1ms..",
                                 ExactDuration(kMax)));
           *target = std::chrono::duration_cast<milliseconds>(*value);
         },
         doc)
      ->type_name("DURATION");
}

// "120:3" or "120:3:1".
Invocation ParseInvocation(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, ':');
  if (parts.size() != 2 && parts.size() != 3)
    Refuse(absl::StrCat("plan is \"", text, "\"; allowed: STEP:LAYER or STEP:LAYER:MICRO_BATCH"));
  Invocation invocation;
  invocation.step = ParseInt("step", parts[0], 0, kMaxStep);
  invocation.layer = static_cast<int32_t>(ParseInt("layer", parts[1], 0, kMaxLayers - 1));
  if (parts.size() == 3)
    invocation.micro_batch = static_cast<int32_t>(ParseInt("micro_batch", parts[2], 0, kMaxMicroBatches - 1));
  return invocation;
}

CLI::App* AddCommand(CLI::App* parent, const std::string& name, const std::string& doc, Options* options,
                     absl::Status (*command)(const Options&, const Console&)) {
  CLI::App* app = parent->add_subcommand(name, doc);
  app->callback([options, command] { options->command = command; });
  return app;
}

// Which one plan a command is about.
void AddPlanChoice(CLI::App* app, Options* options, absl::Status (*command)(const Options&, const Console&)) {
  CLI::Option* step = AddInt(app, "--step", &options->step, 0, kMaxStep, "Step of the plan");
  CLI::Option* latest =
      app->add_flag("--latest", options->latest, "The newest plan of the layer, whatever its step");
  latest->excludes(step);
  AddInt(app, "--layer", &options->layer, 0, kMaxLayers - 1, "Layer of the plan")->required();
  AddInt(app, "--micro-batch", &options->micro_batch, 0, kMaxMicroBatches - 1, "Micro-batch of the plan [0]");
  app->callback([options, command] {
    if (!options->step.has_value() && !options->latest) Refuse("--step or --latest is required");
    options->command = command;
  });
}

void AddPlanCommands(CLI::App* top, Options* options) {
  CLI::App* plans =
      top->add_subcommand("plans", "The plans that were made: list, show, explain, diff, watch");
  plans->require_subcommand(1);
  CLI::App* list = AddCommand(plans, "list", "Plans, newest first", options, &ListPlans);
  PlanFilter* filter = &options->filter;
  AddInt(list, "--from-step", &filter->from_step, 0, kMaxStep, "First step [0]");
  AddInt(list, "--to-step", &filter->to_step, 0, kMaxStep, "Last step [the newest]");
  AddInt(list, "--layer", &filter->layer, 0, kMaxLayers - 1, "Only this layer");
  list->add_flag("--infeasible", filter->infeasible_only, "Only plans that did not meet every limit");
  AddInt(list, "--limit", &filter->limit, 1, 100'000, "At most this many [20]");
  list->add_option_function<std::string>(
          "--page-token",
          [filter](const std::string& text) {
            CheckText("--page-token", text);
            filter->page_token = text;
          },
          "Continue a list that said so")
      ->type_name("TOKEN");
  AddPlanChoice(plans->add_subcommand("show", "One plan: quotas, instances and rows"), options, &ShowPlan);
  AddPlanChoice(plans->add_subcommand("explain", "Why the plan is as it is, and what was measured of it"),
                options, &ExplainPlanCommand);
  CLI::App* diff =
      AddCommand(plans, "diff", "What changed from one plan to another", options, &DiffPlansCommand);
  diff->add_option_function<std::vector<std::string>>(
          "plans",
          [options](const std::vector<std::string>& texts) {
            for (const std::string& text : texts) options->diff.push_back(ParseInvocation(text));
          },
          "Two plans, each STEP:LAYER or STEP:LAYER:MICRO_BATCH")
      ->expected(2)
      ->required()
      ->type_name("PLAN");
  CLI::App* watch = AddCommand(plans, "watch", "One line per plan, as they are made", options, &WatchPlans);
  AddInt(watch, "--layer", &filter->layer, 0, kMaxLayers - 1, "Only this layer");
  AddInt(watch, "--count", &options->watch_count, 1, 1'000'000'000, "End after this many plans");
  AddDuration(watch, "--for", &options->watch_for, "End after this long, e.g. 30s");
}

void AddChanges(CLI::App* app, const std::string& flag, Options* options, const std::string& doc) {
  app->add_option_function<std::vector<std::string>>(
         flag,
         [options](const std::vector<std::string>& texts) {
           for (const std::string& text : texts) {
             CheckText("change", text);
             const size_t equals = text.find('=');
             if (equals == std::string::npos || equals == 0)
               Refuse(absl::StrCat("change is \"", text, "\"; allowed: NAME=VALUE"));
             options->changes.emplace_back(text.substr(0, equals), text.substr(equals + 1));
           }
         },
         doc)
      ->type_name("CHANGE");
}

void AddPolicyCommands(CLI::App* top, Options* options) {
  CLI::App* policy = top->add_subcommand("policy", "The policy of the running job: get, set");
  policy->require_subcommand(1);
  AddCommand(policy, "get", "All policy settings", options, &ShowPolicy);
  CLI::App* set = AddCommand(policy, "set", "Change settings, on all ranks at once from an announced step",
                             options, &ChangePolicy);
  AddChanges(set, "changes", options, "NAME=VALUE, e.g. retention_floor=0.5 rates=1,0.9,0.8");
  set->get_option("changes")->required();
}

void AddSimulate(CLI::App* top, Options* options) {
  CLI::App* simulate =
      top->add_subcommand("simulate", "What would have been planned with other settings; changes nothing");
  AddPlanChoice(simulate, options, &SimulatePlanCommand);
  simulate
      ->add_option_function<std::string>(
          "--planner",
          [options](const std::string& text) {
            CheckText("--planner", text);
            options->planner = text;
          },
          "Any policy that `lrmoe-sim policies` lists [the recorded plan's]")
      ->type_name("NAME");
  AddChanges(simulate, "--set", options, "Policy changes, e.g. --set balance_tolerance=0.05 rates=0.8");
  AddInt(simulate, "--ranks", &options->ranks, 1, kMaxRanks,
         "On so many ranks: sources are split or merged evenly [as recorded]");
  simulate
      ->add_option_function<std::string>(
          "--memory-budget",
          [options](const std::string& text) {
            const absl::StatusOr<int64_t> bytes = ParseBytes(text);
            if (!bytes.ok() || *bytes < 0)
              Refuse(absl::StrCat("--memory-budget is \"", text,
                                  "\"; allowed: a size like 512MiB, 0: unlimited"));
            options->memory_budget_bytes = *bytes;
          },
          "Of each rank, over all layers; 0: unlimited [the ranks' own]")
      ->type_name("SIZE");
  AddInt(simulate, "--replica-slots", &options->replica_slots, 0, kMaxExperts,
         "Of each rank and layer [the ranks' own]");
  simulate->add_flag("--no-residents", options->no_residents, "As if no rank held a replica yet");
}

void AddTraceAndDrain(CLI::App* top, Options* options) {
  CLI::App* trace = top->add_subcommand("trace", "Recorded routing: export");
  trace->require_subcommand(1);
  CLI::App* exported =
      AddCommand(trace, "export", "Write the counts of the plans still remembered, for lrmoe-sim replay",
                 options, &ExportTrace);
  exported->add_option("--file", options->file, "Where to; - is standard output")
      ->required()
      ->type_name("FILE");
  AddInt(exported, "--from-step", &options->filter.from_step, 0, kMaxStep, "First step [0]");
  AddInt(exported, "--to-step", &options->filter.to_step, 0, kMaxStep, "Last step [the newest]");
  AddInt(exported, "--layer", &options->filter.layer, 0, kMaxLayers - 1, "Only this layer");
  CLI::App* drain =
      AddCommand(top, "drain", "Ask every worker to end its training process", options, &DrainWorkers);
  drain
      ->add_option_function<std::string>(
          "--reason",
          [options](const std::string& text) {
            CheckText("--reason", text);
            options->reason = text;
          },
          "Shown in the workers' logs")
      ->type_name("TEXT");
}

void Describe(CLI::App* app, Options* options) {
  app->name("lrmoectl");
  app->require_subcommand(1);
  app->fallthrough();
  app->set_version_flag("--version", absl::StrCat("lrmoectl ", Version()), "Print the version");
  app->add_option("--controller", options->controller,
                  "Address of the admin API [LRMOE_CONTROLLER, else 127.0.0.1:7070]")
      ->type_name("HOST:PORT");
  app->add_option_function<std::string>(
         "--output",
         [options](const std::string& text) {
           if (text != "table" && text != "json")
             Refuse(absl::StrCat("--output is \"", text, "\"; allowed: table, json"));
           options->output = text;
         },
         "table for people, json for programs [table]")
      ->type_name("table|json");
  AddDuration(app, "--timeout", &options->timeout, "Longest wait for an answer [5s]");
  AddCommand(app, "status", "The controller, its epoch and what it waits for", options, &ShowStatus);
  AddCommand(app, "workers", "One row per rank", options, &ShowWorkers);
  AddCommand(app, "layers", "One row per layer: retention, imbalance, replicas", options, &ShowLayers);
  AddPlanCommands(app, options);
  AddPolicyCommands(app, options);
  AddSimulate(app, options);
  AddTraceAndDrain(app, options);
}

int Usage(const Console& console, absl::string_view message) {
  console.err << "lrmoectl: " << message << "\nRun lrmoectl --help for the commands.\n";
  return kExitUsage;
}

// CLI11 asks for a "subcommand" also when it was given an unknown one.
std::string MessageOf(const CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() != static_cast<int>(CLI::ExitCodes::RequiredError)) return error.what();
  if (absl::StrContains(error.what(), "ubcommand")) {
    const std::vector<std::string> unknown = app.remaining(true);
    return unknown.empty() ? "a command is required"
                           : absl::StrCat("unknown command \"", unknown.front(), "\"");
  }
  return error.what();
}

}  // namespace

int Run(const std::vector<std::string>& arguments, const std::function<const char*(const char*)>& environment,
        const Console& console) {
  Options options;
  const char* address = environment("LRMOE_CONTROLLER");
  if (address != nullptr && *address != '\0') options.controller = address;
  CLI::App app("Looks into and steers a running lrmoe-controller.");
  Describe(&app, &options);
  try {
    app.parse(std::vector<std::string>(arguments.rbegin(), arguments.rend()));
  } catch (const CLI::ParseError& error) {
    if (error.get_exit_code() != 0) return Usage(console, MessageOf(app, error));
    app.exit(error, console.out, console.err);  // help or version
    return kExitDone;
  }
  if (const absl::Status status = ValidateAddress(options.controller); !status.ok())
    return Usage(console, std::string(status.message()));
  const absl::Status status = options.command(options, console);
  if (status.ok()) return kExitDone;
  console.err << "lrmoectl: " << std::string(status.message()) << "\n";
  return status.code() == absl::StatusCode::kInvalidArgument ? kExitUsage : kExitFailed;
}

}  // namespace lrmoe::ctl
