// The table form of `lrmoe-bench layer`.
#include <cstdio>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>

#include "common/units.h"
#include "tools/bench/layer_report.h"

namespace lrmoe::bench {
namespace {

using nlohmann::json;

void PrintPhases(const char* name, const json& phases, std::initializer_list<const char*> order) {
  for (const char* phase : order) {
    const json& p = phases[phase];
    std::printf("  %-9s %-10s %10.3f %10.3f %10.3f\n", name, phase, p["median"].get<double>(),
                p["min"].get<double>(), p["max"].get<double>());
  }
}

void PrintWire(const json& wire) {
  std::printf("  %-22s %14s %14s\n", "bytes on the wire", "measured", "predicted");
  for (const char* pass : {"forward", "backward"})
    for (const auto& [name, kind] : wire[pass].items())
      std::printf("  %-9s %-12s %14s %14s\n", pass, name.c_str(),
                  HumanCount(kind["measured"].get<int64_t>()).c_str(),
                  HumanCount(kind["predicted"].get<int64_t>()).c_str());
  std::printf(
      "  every rank as predicted: %s; scalars %.2f %% of the backward's bytes; weights %s, agreements %s\n",
      wire["equal"].get<bool>() ? "yes" : "NO", 100 * wire["scalar_share_of_backward"].get<double>(),
      HumanCount(wire["weights"].get<int64_t>()).c_str(),
      HumanCount(wire["agreements"].get<int64_t>()).c_str());
}

void PrintExchanges(const json& exchanges) {
  std::printf("  %-28s %10s %10s %8s\n", "exchanges, ms (median)", "under way", "waited", "hidden");
  for (const auto& [operation, time] : exchanges.items())
    std::printf("  %-28s %10.3f %10.3f %6.0f %%\n", operation.c_str(), time["under_way_ms"].get<double>(),
                time["waited_ms"].get<double>(), 100 * time["hidden"].get<double>());
}

void PrintArm(const json& arm) {
  const json& rows = arm["rows"];
  std::printf(
      "\npolicy %s, retention %.2f, overlap %s: %s of %s rows kept, %s moved, %lld replicas; imbalance "
      "before %.3f, "
      "forward %.3f, backward %.3f\n",
      arm["policy"].get<std::string>().c_str(), arm["retention"].get<double>(),
      arm["overlap"].get<bool>() ? "on" : "off", HumanCount(rows["kept"].get<int64_t>()).c_str(),
      HumanCount(rows["routed"].get<int64_t>()).c_str(), HumanCount(rows["moved"].get<int64_t>()).c_str(),
      arm["replicas"].get<long long>(), arm["imbalance"]["before"].get<double>(),
      arm["imbalance"]["forward"].get<double>(), arm["imbalance"]["backward"].get<double>());
  std::printf("  %-20s %10s %10s %10s   critical rank %d\n", "ms", "median", "min", "max",
              arm["critical_rank"].get<int>());
  PrintPhases("forward", arm["forward_ms"], {"plan", "weights", "dispatch", "compute", "return", "total"});
  PrintPhases("backward", arm["backward_ms"],
              {"score", "select", "pack", "dispatch", "compute", "return", "gradients", "total"});
  const json& cpu = arm["critical_rank_cpu_ms"];
  if (cpu.is_null()) {
    std::printf("  processor time: not told apart (several ranks of several threads in one process)\n");
  } else {
    PrintPhases("cpu", cpu, {"forward", "backward"});
    std::printf("  %.1f GFLOP/s, %.1f per second of processor time: %.1f %% of the peak %.1f\n",
                arm["gflop_per_s"].get<double>(), arm["gflop_per_cpu_s"].get<double>(),
                100 * arm["fraction_of_peak"].get<double>(), arm["peak_gflop_per_s"].get<double>());
  }
  std::printf("  scoring, selection, packing and routing: %.1f %% of the backward pass\n",
              100 * arm["selection_share_of_backward"].get<double>());
  PrintExchanges(arm["exchanges"]);
  PrintWire(arm["wire_bytes"]);
  const json& memory = arm["memory_bytes"];
  std::printf("  peak memory %s, predicted %s; worst difference of a rank %.2f %%\n",
              HumanBytes(memory["measured"].get<double>()).c_str(),
              HumanBytes(memory["predicted"].get<double>()).c_str(),
              100 * memory["worst_relative_difference"].get<double>());
}

}  // namespace

void PrintExchangeReport(const json& report) {
  for (const json& arm : report) {
    std::printf("\noverlap %s, policy %s, retention %.2f\n", arm["overlap"].get<bool>() ? "on" : "off",
                arm["policy"].get<std::string>().c_str(), arm["retention"].get<double>());
    for (const char* pass : {"forward_ms", "backward_ms", "layer_ms"})
      PrintPhases("", {{pass, arm[pass]}}, {pass});
    PrintExchanges(arm["exchanges"]);
  }
}

void PrintLayerReport(const json& report) {
  const json& s = report["shape"];
  const json& run = report["run"];
  std::printf(
      "E %d  k %d  H %d  F %d  T %lld  %s  ranks %d  threads %d  skew %.2f  %s  %s weights  d(alpha) %s\n",
      s["experts"].get<int>(), s["top_k"].get<int>(), s["hidden"].get<int>(), s["intermediate"].get<int>(),
      s["tokens"].get<long long>(), s["dtype"].get<std::string>().c_str(), s["ranks"].get<int>(),
      s["threads"].get<int>(), s["skew"].get<double>(), s["activation_memory"].get<std::string>().c_str(),
      s["packed_weights"].get<bool>() ? "packed" : "plain", s["router_gradient"].get<std::string>().c_str());
  std::printf("lrmoe %s, seed %llu, %d steps, load %.1f; %s\n", run["version"].get<std::string>().c_str(),
              run["seed"].get<unsigned long long>(), run["steps"].get<int>(),
              run["load_average"].get<double>(), run["gemm_path"].get<std::string>().c_str());
  PrintArm(report);
  if (!report.contains("against")) return;
  PrintArm(report["against"]);
  std::printf("\nratio to policy %s:", report["against"]["policy"].get<std::string>().c_str());
  for (const auto& [name, ratio] : report["ratios"].items())
    if (!ratio.is_null()) std::printf("  %s %.3f", name.c_str(), ratio.get<double>());
  std::printf("\n");
}

}  // namespace lrmoe::bench
