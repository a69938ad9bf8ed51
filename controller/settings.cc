#include "controller/settings.h"

#include <chrono>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/logging.h"
#include "common/policy.h"
#include "common/status_macros.h"
#include "common/units.h"

namespace lrmoe {
namespace {

void AddPolicyField(Policy* policy, Settings* parser, const std::string& name, std::string placeholder,
                    std::string doc) {
  parser->AddCustom(
      name, {.set = [policy, name](absl::string_view text) { return SetPolicyField(*policy, name, text); },
             .text =
                 [policy, name] {
                   for (auto& [field, value] : PolicyFields(*policy))
                     if (field == name) return value;
                   return std::string();
                 },
             .placeholder = std::move(placeholder),
             .doc = std::move(doc)});
}

void AddPolicy(Policy* policy, Settings* parser) {
  AddPolicyField(policy, parser, "planner", "NAME",
                 "Planner: lrmoe, or fixed (ownership as it is, nothing dropped).");
  AddPolicyField(
      policy, parser, "rates", "R,R,...",
      "Candidate retention rates, descending, each in (0, 1]; the first that fits is taken, one value forces "
      "it.");
  AddPolicyField(policy, parser, "retention_floor", "X",
                 "Least share of any expert's rows that is kept, 0..1.");
  AddPolicyField(policy, parser, "balance_tolerance", "X",
                 "How far the most loaded rank may exceed the mean before replicas are added, 0..10.");
  AddPolicyField(policy, parser, "window_us", "US",
                 "Communication must fit in this many microseconds; inf: no limit.");
  AddPolicyField(policy, parser, "on_infeasible", "WHAT",
                 "When no candidate fits: fail, or best_effort (the plan of the last one, marked).");
  AddPolicyField(policy, parser, "selection", "SCORE",
                 "Which rows are kept: lrm, lrm_sampled (by chance, unbiased), or for comparison grad_norm2, "
                 "grad_abs, random.");
  AddPolicyField(
      policy, parser, "rescale", "HOW",
      "Whether an expert's kept rows count for its dropped ones in the gradients: off, or rows (times "
      "all its rows over the kept ones).");
  AddPolicyField(
      policy, parser, "router_gradient", "MODE",
      "Gradient of the routing weights: exact (all pairs), or retained (kept pairs only, less memory).");
  AddPolicyField(policy, parser, "seed", "N", "Seed of the random and sampled selections.");
}

void AddMicroseconds(Settings* parser, const std::string& name, int64_t* target_us, DurationRange range,
                     std::string doc) {
  parser->AddCustom(name,
                    {.set = [name, target_us, range](absl::string_view text) -> absl::Status {
                       const absl::StatusOr<std::chrono::microseconds> value = ParseDuration(text);
                       if (!value.ok() || *value < range.min || *value > range.max)
                         return absl::InvalidArgumentError(
                             absl::StrCat(name, " is \"", text, "\"; allowed: a duration like 500ms or 5s, ",
                                          ExactDuration(range.min), "..", ExactDuration(range.max)));
                       *target_us = value->count();
                       return absl::OkStatus();
                     },
                     .text = [target_us] { return ExactDuration(std::chrono::microseconds(*target_us)); },
                     .placeholder = "DURATION",
                     .doc = std::move(doc)});
}

void AddLimits(ControllerSettings* settings, Settings* parser) {
  using std::chrono::hours;
  using std::chrono::milliseconds;
  core::CoreOptions& core = settings->server.core;
  AddMicroseconds(parser, "hello_timeout", &core.hello_timeout_us, {milliseconds(1), hours(1)},
                  "A stream that says no hello within this is closed.");
  AddMicroseconds(parser, "reconnect_grace", &core.reconnect_grace_us, {milliseconds(0), hours(1)},
                  "A lost worker may come back within this; then its epoch is aborted.");
  AddMicroseconds(parser, "missing_after", &core.missing_after_us, {milliseconds(1), hours(1)},
                  "A rank that others have waited for this long is named in status and log.");
  parser->AddInt("max_ranks", &core.max_ranks, {1, 1024}, "Largest world size.");
  parser->AddInt("max_layers", &core.max_layers, {1, 1024}, "Most layers of a model.");
  parser->AddInt("max_experts", &core.max_experts, {1, 4096}, "Most experts of a layer.");
  parser->AddInt("max_sessions", &core.max_sessions, {1, 65536}, "Most worker streams at once.");
  parser->AddInt("max_queued_invocations", &core.max_queued_invocations, {1, 65536},
                 "Most invocations that wait for counts or for their plan.");
  parser->AddInt("plan_history", &core.max_plans_kept, {1, 1 << 20},
                 "Plans kept, for lrmoectl and for ranks that ask again.");
  parser->AddBytes("plan_history_bytes", &core.max_plan_bytes_kept, {1 << 20, int64_t{1} << 40},
                   "Memory for the plans kept; the oldest go first.");
  parser->AddInt("max_message_bytes", &settings->listener.max_message_bytes, {4096, 64 << 20},
                 "Largest message a worker or lrmoectl may send.");
  parser->AddInt("max_watchers", &settings->server.max_watchers, {0, 1024}, "Most plan watchers at once.");
  parser->AddInt("planning_threads", &settings->server.planning_threads, {1, 16},
                 "Threads that plan; a layer is planned by one at a time.");
  AddMicroseconds(
      parser, "max_loop_plan", &settings->server.max_loop_plan_us,
      {std::chrono::microseconds(0), milliseconds(10)},
      "A layer whose last plans took no longer is planned without the way to a planning thread; 0us: "
      "none is.");
}

}  // namespace

void AddControllerSettings(ControllerSettings* settings, Settings* parser) {
  parser->AddString("listen", &settings->listener.address,
                    "Address for workers and lrmoectl: host:port (port 0: any free one), or unix:path.");
  parser->AddInt("ranks", &settings->server.core.ranks, {0, 1024},
                 "World size a job must have; 0: what its first worker says.");
  parser->AddString("port_file", &settings->port_file, "Write the address here once listening.");
  parser->AddString(
      "state_dir", &settings->state_dir,
      "Keep plan history and policy in this directory, made if missing; empty: in memory only.");
  AddPolicy(&settings->server.core.policy, parser);
  AddLimits(settings, parser);
  parser->AddChoice("log_level", &settings->log_level, LogLevelNames(), "What to log.");
}

absl::Status Validate(const ControllerSettings& settings) {
  LRMOE_RETURN_IF_ERROR(Validate(settings.server));
  return rpc::Validate(settings.listener);
}

}  // namespace lrmoe
