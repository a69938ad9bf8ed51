// lrmoe-sim generate: synthetic routing as a trace.
#include <fstream>
#include <iostream>
#include <memory>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "common/synthetic_routing.h"
#include "common/trace.h"
#include "tools/sim/commands.h"
#include "tools/sim/progress.h"

namespace lrmoe::sim {
namespace {

struct Options {
  std::string workload, out;
  int64_t steps = 100;
  int32_t layers = 1;
  SyntheticOptions synthetic;
};

absl::Status Generate(Options& options, std::ostream& out) {
  SyntheticOptions& synthetic = options.synthetic;
  LRMOE_ASSIGN_OR_RETURN(synthetic.workload, ParseSyntheticWorkload(options.workload));
  LRMOE_RETURN_IF_ERROR(Validate(synthetic));
  TraceHeader header{absl::StrCat("synthetic ", ToString(synthetic.workload)),
                     synthetic.num_experts,
                     synthetic.top_k,
                     synthetic.num_ranks,
                     options.layers,
                     {{"note", absl::StrCat("lrmoe-sim generate, seed ", synthetic.seed, ", ",
                                            synthetic.tokens_per_rank, " tokens per rank")}}};
  LRMOE_ASSIGN_OR_RETURN(TraceWriter writer, TraceWriter::Create(out, header));
  ProgressBar bar("generate");
  for (int64_t step = 0; step < options.steps; ++step) {
    for (int32_t layer = 0; layer < options.layers; ++layer)
      LRMOE_RETURN_IF_ERROR(writer.Write({{step, layer, 0}, SyntheticCounts(synthetic, step, layer)}));
    bar.Update(static_cast<double>(step) / static_cast<double>(options.steps), step * options.layers);
  }
  out.flush();
  return out ? absl::OkStatus() : absl::DataLossError("cannot write the trace");
}

absl::Status Run(Options options) {
  if (options.out.empty()) return Generate(options, std::cout);
  std::ofstream file(options.out, std::ios::binary);
  if (!file) return absl::UnavailableError(absl::StrCat("cannot write ", options.out));
  return Generate(options, file);
}

}  // namespace

void AddGenerateCommand(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  SyntheticOptions& synthetic = options->synthetic;
  CLI::App* command = app.add_subcommand("generate", "Write a trace of synthetic routing to standard output");
  command->add_option("--workload", options->workload, "W0..W7 or zipf:ALPHA")->required();
  command->add_option("--experts", synthetic.num_experts, "Experts")->capture_default_str();
  command->add_option("--ranks", synthetic.num_ranks, "Ranks, each a source")->capture_default_str();
  command->add_option("--tokens", synthetic.tokens_per_rank, "Tokens per rank")->capture_default_str();
  command->add_option("--top-k", synthetic.top_k, "Distinct experts per token")->capture_default_str();
  command->add_option("--steps", options->steps, "Steps")
      ->check(CLI::Range(int64_t{1}, int64_t{1} << 40))
      ->capture_default_str();
  command->add_option("--layers", options->layers, "Layers in each step")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--seed", synthetic.seed, "Equal seeds give equal traces")->capture_default_str();
  command->add_option("--out", options->out, "File to write instead of standard output");
  command->callback([options, &exit_code] { exit_code = Report("generate", Run(*options)); });
}

}  // namespace lrmoe::sim
