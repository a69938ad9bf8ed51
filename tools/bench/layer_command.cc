// lrmoe-bench layer: a whole MoE layer by the real engine, phase by phase.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "controller/planner/policies/policies.h"
#include "tools/bench/commands.h"
#include "tools/bench/layer_report.h"
#include "tools/bench/layer_run.h"
#include "worker/transport/mpi.h"

namespace lrmoe::bench {
namespace {

struct Options {
  LayerRun run;
  Arm arm{"lrmoe", 1.0};
  std::string against, dtype = "bf16", router_gradient = "exact", activation_memory = "save";
  std::string packed_weights = "auto", overlap = "off", transport = "inproc";
  std::string output = "table";
};

int RunUnderMpi(Options& o) {
  const auto fail = [](const absl::Status& status) {
    std::cerr << "lrmoe-bench layer: " << status.message() << "\n";
    return 1;
  };
  auto runtime = transport::StartMpi();
  if (!runtime.ok()) return fail(runtime.status());
  const transport::MpiPlace place = (*runtime)->place();
  o.run.num_ranks = place.size;
  auto transport = (*runtime)->CreateTransport({.progress_thread = o.overlap != "off"});
  if (!transport.ok()) return fail(transport.status());
  const absl::StatusOr<LayerResult> result = RunRank(o.run, *std::move(transport));
  if (!result.ok()) return fail(result.status());
  if (place.rank != 0) return 0;
  const nlohmann::json report = ExchangeReport(o.run, *result);
  if (o.output == "json") {
    std::cout << report.dump(2) << "\n";
  } else {
    PrintExchangeReport(report);
  }
  return 0;
}

// What one flag allows and another does not.
absl::Status CheckFlags(const Options& o) {
  if (!std::isfinite(o.run.skew) || !std::isfinite(o.run.link_mbit_per_s))  // NaN is in every CLI::Range
    return absl::InvalidArgumentError("--skew or --link-mbit-per-s is not a number; allowed: numbers");
  if (o.run.link_mbit_per_s > 0 && o.run.link_mbit_per_s < 1)
    return absl::InvalidArgumentError(
        absl::StrCat("--link-mbit-per-s is ", o.run.link_mbit_per_s, "; allowed: 0 or 1..10000000"));
  if (o.overlap == "compare" && !o.against.empty())
    return absl::InvalidArgumentError(
        "--overlap compare and --against: each is a second policy; allowed: one");
  if (o.transport != "mpi") return absl::OkStatus();
  if (o.run.link_mbit_per_s != 0)
    return absl::InvalidArgumentError("--link-mbit-per-s with --transport mpi; allowed: 0");
  if (o.run.num_ranks != 1)
    return absl::InvalidArgumentError("--ranks with --transport mpi, where mpirun says how many; allowed: 1");
  return absl::OkStatus();
}

int Run(Options o) {
  o.run.shape.dtype = o.dtype == "bf16" ? DataType::kBf16 : DataType::kFp32;
  o.run.router_gradient = o.router_gradient == "exact" ? RouterGradient::kExact : RouterGradient::kRetained;
  o.run.recompute_activation = o.activation_memory == "recompute";
  o.run.pack_weights = o.packed_weights == "auto";
  o.arm.overlap = o.overlap != "off";
  o.run.arms = {o.arm};
  if (!o.against.empty()) o.run.arms.push_back({o.against, 1.0, o.arm.overlap});
  if (o.overlap == "compare") o.run.arms.push_back({o.arm.policy, o.arm.retention, false});
  absl::Status valid = Validate(o.run.shape);
  valid.Update(CheckFlags(o));
  if (!valid.ok()) {
    std::cerr << "lrmoe-bench layer: " << valid.message() << "\n";
    return 2;
  }
  if (o.transport == "mpi") return RunUnderMpi(o);
  const absl::StatusOr<LayerResult> result = RunLayer(o.run);
  if (!result.ok()) {
    std::cerr << "lrmoe-bench layer: " << result.status().message() << "\n";
    return 1;
  }
  const nlohmann::json report = LayerReport(o.run, *result);
  if (o.output == "json") {
    std::cout << report.dump(2) << "\n";
  } else {
    PrintLayerReport(report);
  }
  return 0;
}

void AddShape(CLI::App* command, Options* o) {
  LayerShape& shape = o->run.shape;
  shape.num_experts = 16;
  shape.top_k = 4;
  shape.hidden_size = 256;
  shape.intermediate_size = 128;
  command->add_option("--experts", shape.num_experts)->check(CLI::Range(1, 4096))->capture_default_str();
  command->add_option("--top-k", shape.top_k)->check(CLI::Range(1, 64))->capture_default_str();
  command->add_option("--hidden", shape.hidden_size)->check(CLI::Range(1, 65536))->capture_default_str();
  command->add_option("--intermediate", shape.intermediate_size)
      ->check(CLI::Range(1, 262144))
      ->capture_default_str();
  command->add_option("--tokens", o->run.num_tokens, "of each rank")
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  command->add_option("--dtype", o->dtype)->check(CLI::IsMember({"bf16", "fp32"}))->capture_default_str();
  command->add_option("--skew", o->run.skew, "Zipf exponent of the experts' popularity; 0: balanced")
      ->check(CLI::Range(0.0, 4.0))
      ->capture_default_str();
}

void AddPolicy(CLI::App* command, Options* o) {
  std::vector<std::string> policies;
  for (const planner::PolicyInfo& info : planner::AllPolicies()) policies.emplace_back(info.name);
  command->add_option("--policy", o->arm.policy, "planner")
      ->check(CLI::IsMember(policies))
      ->capture_default_str();
  command->add_option("--retention", o->arm.retention, "share of the rows the backward keeps, in (0, 1]")
      ->check(CLI::Range(0.001, 1.0))
      ->capture_default_str();
  command
      ->add_option("--against", o->against,
                   "measure this policy with every row kept as well, in turns; print the ratios")
      ->check(CLI::IsMember(policies));
  command->add_option("--replica-slots", o->run.replica_slots)
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_flag(
      "--accumulate", o->run.accumulate,
      "weight gradients add up over invocations; else each backward pass is the first of its step");
  command->add_option("--router-gradient", o->router_gradient)
      ->check(CLI::IsMember({"exact", "retained"}))
      ->capture_default_str();
  command->add_option("--activation-memory", o->activation_memory)
      ->check(CLI::IsMember({"save", "recompute"}))
      ->capture_default_str();
  command
      ->add_option("--packed-weights", o->packed_weights,
                   "auto: packed where the device and the sizes allow; off: as they are")
      ->check(CLI::IsMember({"auto", "off"}))
      ->capture_default_str();
}

}  // namespace

void AddLayerCommand(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("layer", "A whole MoE layer by the engine, phase by phase");
  auto options = std::make_shared<Options>();
  AddShape(command, options.get());
  AddPolicy(command, options.get());
  command->add_option("--ranks", options->run.num_ranks, "threads of this process that are ranks")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  command
      ->add_option("--transport", options->transport,
                   "inproc, or mpi: one rank per process under mpirun; prints rank 0's passes and exchanges")
      ->check(CLI::IsMember({"inproc", "mpi"}))
      ->capture_default_str();
  command
      ->add_option("--overlap", options->overlap,
                   "exchange rows while ranks compute; compare: on, and off in turns (as a second policy)")
      ->check(CLI::IsMember({"on", "off", "compare"}))
      ->capture_default_str();
  command
      ->add_option("--link-mbit-per-s", options->run.link_mbit_per_s,
                   "with inproc: each rank's bytes take this long, in real time; 0: nothing is added")
      ->check(CLI::Range(0.0, 1e7))
      ->capture_default_str();
  command->add_option("--threads", options->run.num_threads, "compute threads of each rank")
      ->check(CLI::Range(1, 256))
      ->capture_default_str();
  command->add_option("--repetitions", options->run.steps, "measured steps")
      ->check(CLI::Range(1, 10000))
      ->capture_default_str();
  command->add_option("--seed", options->run.seed)->capture_default_str();
  command->add_option("--output", options->output)
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  command->callback([options, &exit_code] { exit_code = Run(*options); });
}

}  // namespace lrmoe::bench
