// What one lrmoectl command line asks for, and the commands that do it.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "common/ids.h"
#include "tools/lrmoectl/cli.h"

namespace lrmoe::ctl {

struct PlanFilter {
  int64_t from_step = 0;
  std::optional<int64_t> to_step;  // inclusive
  std::optional<int64_t> layer;
  bool infeasible_only = false;
  int64_t limit = 20;  // 1..100000
  std::string page_token;
};

struct Options {
  std::string controller = "127.0.0.1:7070";
  std::string output = "table";  // table | json
  std::chrono::milliseconds timeout{5000};

  PlanFilter filter;            // plans list, watch
  std::optional<int64_t> step;  // plans show, explain; unset with `latest`
  int64_t layer = 0;
  int64_t micro_batch = 0;
  bool latest = false;
  std::vector<Invocation> diff;  // two
  int64_t watch_count = 0;       // 0: no limit
  std::optional<std::chrono::milliseconds> watch_for;
  std::vector<std::pair<std::string, std::string>> changes;  // policy set, simulate
  std::string planner;                                       // simulate; empty: the recorded one
  int64_t ranks = 0;                                         // simulate; 0: as recorded
  std::optional<int64_t> memory_budget_bytes;                // simulate, per rank over all layers
  std::optional<int64_t> replica_slots;                      // simulate
  bool no_residents = false;                                 // simulate
  std::string file;                                          // trace export
  std::string reason;                                        // drain

  // The command that was given.
  absl::Status (*command)(const Options& options, const Console& console) = nullptr;
};

// Each prints its result to console.out.
absl::Status ShowStatus(const Options& options, const Console& console);
absl::Status ShowWorkers(const Options& options, const Console& console);
absl::Status ShowLayers(const Options& options, const Console& console);
absl::Status ListPlans(const Options& options, const Console& console);
absl::Status ShowPlan(const Options& options, const Console& console);
absl::Status ExplainPlanCommand(const Options& options, const Console& console);
absl::Status DiffPlansCommand(const Options& options, const Console& console);
absl::Status WatchPlans(const Options& options, const Console& console);
absl::Status ShowPolicy(const Options& options, const Console& console);
absl::Status ChangePolicy(const Options& options, const Console& console);
absl::Status SimulatePlanCommand(const Options& options, const Console& console);
absl::Status ExportTrace(const Options& options, const Console& console);
absl::Status DrainWorkers(const Options& options, const Console& console);

}  // namespace lrmoe::ctl
