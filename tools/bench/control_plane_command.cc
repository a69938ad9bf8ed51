// lrmoe-bench control-plane: from the last rank's counts to the plan, through the controller's server, gRPC
// and the worker's session, as the engine waits for it.
#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstdio>
#include <iostream>
#include <memory>
#include <mutex>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/logging.h"
#include "common/random.h"
#include "common/status_macros.h"
#include "common/version.h"
#include "controller/planner/planner.h"
#include "controller/rpc/listener.h"
#include "controller/server.h"
#include "tools/bench/commands.h"
#include "worker/rpc/controller_session.h"

namespace lrmoe::bench {
namespace {

using Clock = std::chrono::steady_clock;

struct Options {
  int32_t ranks = 8, experts = 128, top_k = 8;
  int64_t tokens = 4096;
  int iterations = 1000;
  std::string controller, address = "127.0.0.1:0", output = "table";
};

// One rank: a session with the controller, and a thread that asks for plans as an engine does.
struct Rank {
  std::unique_ptr<worker::ControllerSession> session;
  std::vector<int64_t> counts;
  std::vector<Clock::time_point> asked, answered;  // by invocation
  std::vector<double> plan_us;
  absl::Status status;
};

std::vector<int64_t> RandomCounts(const Options& o, uint64_t seed) {
  std::vector<int64_t> counts(o.experts, 0);
  Random random(seed);
  for (int64_t pair = 0; pair < o.tokens * o.top_k; ++pair)  // the product of two draws: some are popular
    ++counts[random.Below(random.Below(o.experts) + 1)];
  return counts;
}

std::unique_ptr<worker::ControllerSession> Connect(const Options& o, const std::string& address,
                                                   int32_t rank) {
  agent::Options options;
  options.controller = address;
  options.hello = {.rank_idx = rank,
                   .world_size = o.ranks,
                   .job = "bench",
                   .node = "bench",
                   .device = "none",
                   .replica_slots = 2,
                   .version = std::string(Version())};
  options.seed = static_cast<uint64_t>(rank);
  auto session = std::make_unique<worker::ControllerSession>(
      std::move(options),
      worker::ControllerSession::Callbacks{.ended = [](agent::EndKind, const std::string&) {},
                                           .drain_asked = [](const std::string&) {}});
  LayerShape shape;
  shape.num_experts = o.experts;
  shape.top_k = o.top_k;
  shape.hidden_size = 2048;
  shape.intermediate_size = 768;
  session->SetModel({.num_layers = 1, .shape = shape});
  return session;
}

void Ask(Rank& rank, int iterations, std::barrier<>& together) {
  for (int64_t step = 0; step < iterations; ++step) {
    together.arrive_and_wait();  // as after the exchange that starts a forward pass
    rank.asked.push_back(Clock::now());
    const absl::StatusOr<ExecutionPlan> plan =
        rank.session->Plan({step, 0, 0}, rank.counts, After(std::chrono::seconds(30)));
    rank.answered.push_back(Clock::now());
    if (plan.ok()) {
      rank.plan_us.push_back(plan->plan.plan_us);
    } else if (rank.status.ok()) {
      rank.status = plan.status();
    }
  }
}

struct Percentiles {
  double p50, p99, min, max;
};
Percentiles PercentilesOf(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return {values[n / 2], values[n * 99 / 100], values.front(), values.back()};
}
nlohmann::json ToJson(const Percentiles& p) {
  return {{"p50", p.p50}, {"p99", p.p99}, {"min", p.min}, {"max", p.max}};
}

absl::StatusOr<nlohmann::json> Measure(const Options& o, const std::string& address) {
  std::vector<Rank> ranks(o.ranks);
  for (int32_t r = 0; r < o.ranks; ++r) {
    ranks[r].counts = RandomCounts(o, 1 + r);
    ranks[r].session = Connect(o, address, r);
  }
  constexpr int kWarmUp = 20;
  std::barrier together(o.ranks);
  std::vector<std::thread> threads;
  for (Rank& rank : ranks) threads.emplace_back([&] { Ask(rank, o.iterations + kWarmUp, together); });
  for (std::thread& thread : threads) thread.join();
  for (Rank& rank : ranks) rank.session->Leave({});
  for (const Rank& rank : ranks) LRMOE_RETURN_IF_ERROR(rank.status);

  const auto us = [](Clock::duration d) { return std::chrono::duration<double, std::micro>(d).count(); };
  std::vector<double> first, all, plan;
  for (int i = kWarmUp; i < o.iterations + kWarmUp; ++i) {
    Clock::time_point asked = ranks[0].asked[i], first_answer = ranks[0].answered[i];
    Clock::time_point last_answer = first_answer;
    for (const Rank& rank : ranks) {
      asked = std::max(asked, rank.asked[i]);
      first_answer = std::min(first_answer, rank.answered[i]);
      last_answer = std::max(last_answer, rank.answered[i]);
    }
    first.push_back(us(first_answer - asked));
    all.push_back(us(last_answer - asked));
    plan.push_back(ranks[0].plan_us[i]);
  }
  double load[1] = {0};
  getloadavg(load, 1);
  return nlohmann::json{{"ranks", o.ranks},
                        {"experts", o.experts},
                        {"invocations", o.iterations},
                        {"controller", o.controller.empty() ? "in this process" : o.controller},
                        {"load_average", load[0]},
                        {"first_plan_us", ToJson(PercentilesOf(first))},
                        {"round_trip_us", ToJson(PercentilesOf(all))},
                        {"planner_us", ToJson(PercentilesOf(plan))}};
}

absl::StatusOr<nlohmann::json> MeasureInProcess(const Options& o) {
  ServerOptions options;
  options.core.ranks = o.ranks;
  Server server(options, planner::Plan);
  LRMOE_ASSIGN_OR_RETURN(const auto listener, rpc::Listener::Start({.address = o.address}, &server));
  absl::StatusOr<nlohmann::json> out = Measure(o, listener->address());
  listener->Stop("the benchmark is over");
  return out;
}

int Run(const Options& o) {
  if (const absl::Status logging = StartLogging("lrmoe-bench", "error"); !logging.ok()) {
    std::cerr << "lrmoe-bench control-plane: " << logging.message() << "\n";
    return 1;
  }
  const absl::StatusOr<nlohmann::json> out =
      o.controller.empty() ? MeasureInProcess(o) : Measure(o, o.controller);
  if (!out.ok()) {
    std::cerr << "lrmoe-bench control-plane: " << out.status().message() << "\n";
    return 1;
  }
  if (o.output == "json") {
    std::cout << out->dump(2) << "\n";
    return 0;
  }
  std::printf("%d ranks, %d experts, %d invocations, controller %s, load %.1f\n", o.ranks, o.experts,
              o.iterations, (*out)["controller"].get<std::string>().c_str(),
              (*out)["load_average"].get<double>());
  std::printf("%-52s %10s %10s %10s %10s\n", "us", "p50", "p99", "min", "max");
  for (const auto& [field, text] : {std::pair{"planner_us", "planner"},
                                    {"first_plan_us", "last rank's counts to the first rank's plan"},
                                    {"round_trip_us", "last rank's counts to every rank's plan"}}) {
    const nlohmann::json& p = (*out)[field];
    std::printf("%-52s %10.0f %10.0f %10.0f %10.0f\n", text, p["p50"].get<double>(), p["p99"].get<double>(),
                p["min"].get<double>(), p["max"].get<double>());
  }
  return 0;
}

}  // namespace

void AddControlPlaneCommand(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("control-plane", "Round trip of counts and plan through the controller");
  auto options = std::make_shared<Options>();
  command->add_option("--ranks", options->ranks)->check(CLI::Range(1, 1024))->capture_default_str();
  command->add_option("--experts", options->experts)->check(CLI::Range(1, 4096))->capture_default_str();
  command->add_option("--top-k", options->top_k)->check(CLI::Range(1, 64))->capture_default_str();
  command->add_option("--tokens", options->tokens, "of each rank")
      ->check(CLI::Range(0, 1 << 24))
      ->capture_default_str();
  command->add_option("--invocations", options->iterations)
      ->check(CLI::Range(1, 1000000))
      ->capture_default_str();
  command->add_option("--controller", options->controller,
                      "a running lrmoe-controller without workers, host:port; default: one in this process");
  command->add_option("--listen", options->address, "of the controller in this process; unix:PATH works too")
      ->capture_default_str();
  command->add_option("--output", options->output)
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  command->callback([options, &exit_code] {
    if (options->top_k > options->experts) {
      std::cerr << "lrmoe-bench control-plane: top-k is " << options->top_k << "; allowed: 1.."
                << options->experts << ", the experts\n";
      exit_code = 2;
      return;
    }
    exit_code = Run(*options);
  });
}

}  // namespace lrmoe::bench
