// lrmoe-bench planner: how long one plan takes on one core, by size and policy.
#include <cmath>
#include <iostream>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "common/cluster.h"
#include "common/status_macros.h"
#include "common/synthetic_routing.h"
#include "common/table.h"
#include "common/units.h"
#include "controller/planner/planner.h"
#include "controller/planner/policies/policies.h"
#include "tools/bench/commands.h"
#include "tools/bench/measure.h"

namespace lrmoe::bench {
namespace {

struct Options {
  std::vector<std::string> sizes = {"128x8", "256x64", "512x1024"};
  std::vector<std::string> policies = {"lrmoe", "fixed"};
  std::vector<std::string> workloads = {"zipf:0.6", "zipf:1.0", "zipf:1.4", "W2", "W6"};
  int repetitions = 200, best_of = 3;
  double seconds = 20, tolerance = 0.01;
  int32_t slots = 2, ranks_per_node = 8;
  bool residents = false;
  SyntheticOptions synthetic;
  std::string output = "table";
};

struct Size {
  int32_t experts = 0, ranks = 0;
};

// Of one policy at one size.
struct Samples {
  std::vector<double> cpu_us, wall_us;  // of each problem, the least of its runs
  double imbalance = 0, replicas = 0, spent_ms = 0;
};

absl::StatusOr<Size> ParseSize(const std::string& text) {
  const std::vector<std::string> parts = absl::StrSplit(text, 'x');
  Size out;
  if (parts.size() == 2 && absl::SimpleAtoi(parts[0], &out.experts) &&
      absl::SimpleAtoi(parts[1], &out.ranks) && out.experts >= 1 && out.experts <= 4096 && out.ranks >= 1 &&
      out.ranks <= 1024)
    return out;
  return absl::InvalidArgumentError(
      absl::StrCat("size is \"", text, "\"; allowed: EXPERTSxRANKS, up to 4096x1024"));
}

double NearestRank(std::vector<double> values, double q) {
  if (values.empty()) return 0;
  std::ranges::sort(values);
  const auto rank = static_cast<size_t>(std::ceil(q * static_cast<double>(values.size())));
  return values[std::max<size_t>(rank, 1) - 1];
}

// Problems of one size: a new seed each time, the workloads in turn.
class Problems {
 public:
  Problems(const Options& options, const Size& size, std::vector<SyntheticWorkload> workloads)
      : options_(options), synthetic_(options.synthetic), workloads_(std::move(workloads)) {
    synthetic_.num_experts = size.experts;
    synthetic_.num_ranks = size.ranks;
    problem_.owner = ContiguousOwners(size.experts, size.ranks);
    RankResources rank;
    rank.replica_slots = options.slots;
    problem_.cluster.ranks.assign(size.ranks, rank);
    for (int32_t g = 0; g < size.ranks; ++g) problem_.cluster.ranks[g].node = g / options.ranks_per_node;
    problem_.policy.balance_tolerance = options.tolerance;
  }

  absl::Status Check() const { return Validate(synthetic_); }

  // With residents: step 1 of the workload, after a plan of step 0.
  absl::StatusOr<planner::PlanningProblem> Make(int idx, const std::string& policy) {
    const auto count = static_cast<int>(workloads_.size());
    synthetic_.workload = workloads_[idx % count];
    synthetic_.seed = options_.synthetic.seed + static_cast<uint64_t>(idx / count);
    planner::PlanningProblem problem = problem_;
    problem.policy.planner = policy;
    const auto at = [&](int64_t step) -> const RoutedCounts& {
      auto& [made, counts] = counts_[step];
      if (made != idx) made = idx, counts = SyntheticCounts(synthetic_, step, 0);
      return counts;
    };
    problem.counts = at(0);
    if (!options_.residents && !planner::FindPolicy(policy)->uses_history) return problem;
    LRMOE_ASSIGN_OR_RETURN(const LayerPlan before, planner::Plan(problem));
    std::vector<int64_t>& past = problem.history.emplace_back(problem.counts.num_experts(), 0);
    for (int32_t s = 0; s < problem.counts.num_sources(); ++s)
      for (int32_t e = 0; e < problem.counts.num_experts(); ++e) past[e] += problem.counts.at(s, e);
    problem.resident.resize(problem.cluster.ranks.size());
    for (const InstancePlan& instance : before.instances)
      if (!instance.owner && options_.residents && !planner::FindPolicy(policy)->ideal)
        problem.resident[instance.rank_idx].push_back(instance.expert_idx);
    problem.counts = at(1);
    return problem;
  }

 private:
  const Options& options_;
  SyntheticOptions synthetic_;
  std::vector<SyntheticWorkload> workloads_;
  planner::PlanningProblem problem_;
  std::map<int64_t, std::pair<int, RoutedCounts>> counts_ = {{0, {-1, {}}}, {1, {-1, {}}}};  // of steps 0, 1
};

absl::Status MeasureProblem(const planner::PlanningProblem& problem, int best_of, Samples& samples) {
  double cpu = std::numeric_limits<double>::infinity(), wall = cpu;
  for (int i = 0; i < best_of; ++i) {
    const double cpu_before = ClockMs(CLOCK_THREAD_CPUTIME_ID), wall_before = ClockMs(CLOCK_MONOTONIC);
    const auto plan = planner::Plan(problem);
    const double cpu_ms = ClockMs(CLOCK_THREAD_CPUTIME_ID) - cpu_before;
    wall = std::min(wall, ClockMs(CLOCK_MONOTONIC) - wall_before);
    cpu = std::min(cpu, cpu_ms);
    samples.spent_ms += cpu_ms;
    LRMOE_RETURN_IF_ERROR(plan.status());
    if (i > 0) continue;
    LRMOE_RETURN_IF_ERROR(planner::CheckPlan(problem, *plan));
    samples.imbalance += plan->imbalance.forward;
    samples.replicas += plan->new_replicas;
  }
  samples.cpu_us.push_back(cpu * 1e3);
  samples.wall_us.push_back(wall * 1e3);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Samples>> MeasureSize(const Options& options, const Size& size,
                                                 const std::vector<SyntheticWorkload>& workloads) {
  Problems problems(options, size, workloads);
  LRMOE_RETURN_IF_ERROR(problems.Check());
  std::vector<Samples> out(options.policies.size());
  for (int idx = 0; idx < options.repetitions; ++idx) {
    for (size_t p = 0; p < out.size(); ++p) {
      if (out[p].spent_ms > options.seconds * 1e3) continue;
      LRMOE_ASSIGN_OR_RETURN(const planner::PlanningProblem problem, problems.Make(idx, options.policies[p]));
      LRMOE_RETURN_IF_ERROR(MeasureProblem(problem, options.best_of, out[p]));
    }
  }
  return out;
}

nlohmann::ordered_json Quantiles(const std::vector<double>& values) {
  return {
      {"p50", NearestRank(values, 0.5)}, {"p99", NearestRank(values, 0.99)}, {"max", NearestRank(values, 1)}};
}

absl::Status Run(const Options& options) {
  std::vector<SyntheticWorkload> workloads;
  for (const std::string& text : options.workloads) {
    LRMOE_ASSIGN_OR_RETURN(workloads.emplace_back(), ParseSyntheticWorkload(text));
  }
  nlohmann::ordered_json json = {
      {"replica_slots", options.slots}, {"balance_tolerance", options.tolerance},
      {"residents", options.residents}, {"workloads", options.workloads},
      {"best_of", options.best_of},     {"sizes", nlohmann::ordered_json::array()}};
  Table table({{"experts x ranks"},
               {"policy", Align::kLeft},
               {"problems"},
               {"cpu p50"},
               {"p99"},
               {"max"},
               {"wall p50"},
               {"p99"},
               {"max"},
               {"imbalance"},
               {"copies"}});
  for (const std::string& text : options.sizes) {
    LRMOE_ASSIGN_OR_RETURN(const Size size, ParseSize(text));
    LRMOE_ASSIGN_OR_RETURN(const std::vector<Samples> measured, MeasureSize(options, size, workloads));
    nlohmann::ordered_json& entry =
        json["sizes"].emplace_back(nlohmann::ordered_json{{"experts", size.experts}, {"ranks", size.ranks}});
    for (size_t p = 0; p < measured.size(); ++p) {
      const Samples& s = measured[p];
      const auto problems = static_cast<double>(std::max<size_t>(1, s.cpu_us.size()));
      entry["policies"].push_back({{"policy", options.policies[p]},
                                   {"problems", s.cpu_us.size()},
                                   {"cpu_us", Quantiles(s.cpu_us)},
                                   {"wall_us", Quantiles(s.wall_us)},
                                   {"imbalance_mean", s.imbalance / problems},
                                   {"new_replicas_mean", s.replicas / problems}});
      std::vector<std::string> cells = {text, options.policies[p], absl::StrCat(s.cpu_us.size())};
      for (const auto* values : {&s.cpu_us, &s.wall_us})
        for (double q : {0.5, 0.99, 1.0}) cells.push_back(HumanMicros(NearestRank(*values, q)));
      cells.push_back(Fixed(s.imbalance / problems, 3));
      cells.push_back(Fixed(s.replicas / problems, 1));
      table.AddRow(std::move(cells));
    }
  }
  std::cout << (options.output == "json" ? json.dump(2) + "\n" : table.ToString(false));
  return absl::OkStatus();
}

}  // namespace

void AddPlannerCommand(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<Options>();
  auto* command = app.add_subcommand("planner", "Planning time on one core, by size and policy");
  std::vector<std::string> known = {"all"};
  for (const planner::PolicyInfo& info : planner::AllPolicies()) known.emplace_back(info.name);
  command->add_option("--sizes", options->sizes, "EXPERTSxRANKS,...")->delimiter(',')->capture_default_str();
  command->add_option("--policies", options->policies, "Policies, or all")
      ->delimiter(',')
      ->check(CLI::IsMember(known))
      ->capture_default_str();
  command->add_option("--workloads", options->workloads, "In turn, each with a new seed")
      ->delimiter(',')
      ->capture_default_str();
  command->add_option("--tokens", options->synthetic.tokens_per_rank, "Per rank")->capture_default_str();
  command->add_option("--top-k", options->synthetic.top_k)->capture_default_str();
  command->add_option("--seed", options->synthetic.seed)->capture_default_str();
  command->add_option("--replica-slots", options->slots)->check(CLI::Range(0, 4096))->capture_default_str();
  command->add_option("--ranks-per-node", options->ranks_per_node)
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--tolerance", options->tolerance)->check(CLI::Range(0.0, 10.0))->capture_default_str();
  command->add_flag("--residents", options->residents, "Plan after a plan of the same workload's last step");
  command->add_option("--repetitions", options->repetitions, "Problems of each size")
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  command->add_option("--best-of", options->best_of, "Runs of each problem; the least time counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--seconds", options->seconds, "Planning at most, for each size and policy")
      ->check(CLI::Range(0.001, 1e6))
      ->capture_default_str();
  command->add_option("--output", options->output)
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  command->callback([options, known, &exit_code] {
    if (std::ranges::count(options->policies, "all") > 0)
      options->policies.assign(known.begin() + 1, known.end());
    const absl::Status status = Run(*options);
    if (!status.ok()) std::cerr << "lrmoe-bench planner: " << status.message() << "\n";
    exit_code = status.ok() ? 0 : 1;
  });
}

}  // namespace lrmoe::bench
