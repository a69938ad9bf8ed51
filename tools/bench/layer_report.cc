#include "tools/bench/layer_report.h"

#include <stdlib.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "common/version.h"
#include "tools/bench/peak.h"
#include "tools/bench/wire_model.h"

namespace lrmoe::bench {
namespace {

using nlohmann::json;
using Phases = InvocationReport::Phases;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const size_t n = values.size();
  return n % 2 == 1 ? values[n / 2] : (values[n / 2 - 1] + values[n / 2]) / 2;
}

json Summary(const std::vector<double>& values) {
  const auto [low, high] = std::minmax_element(values.begin(), values.end());
  return {{"median", Median(values)}, {"min", *low}, {"max", *high}};
}

// One value per measured step, of one rank.
template <typename Get>
std::vector<double> OfRank(const ArmResult& arm, size_t rank, Get get) {
  std::vector<double> values;
  for (const auto& step : arm.reports) values.push_back(get(step[rank]));
  return values;
}
// The largest over ranks of each step, and the sum.
template <typename Get>
std::vector<double> Largest(const ArmResult& arm, Get get) {
  std::vector<double> values;
  for (const auto& step : arm.reports) {
    double most = 0;
    for (const InvocationReport& report : step) most = std::max(most, get(report));
    values.push_back(most);
  }
  return values;
}
template <typename Get>
std::vector<double> Sum(const ArmResult& arm, Get get) {
  std::vector<double> values;
  for (const auto& step : arm.reports) {
    double sum = 0;
    for (const InvocationReport& report : step) sum += get(report);
    values.push_back(sum);
  }
  return values;
}

double BackwardCpu(const InvocationReport& r) {
  return r.backward.cpu_ms;
}
double ForwardCpu(const InvocationReport& r) {
  return r.forward.cpu_ms;
}
double TotalMs(const InvocationReport& r) {
  return r.forward.total_ms + r.backward.total_ms;
}

// Ranks of one process tell their processor time apart by thread, which needs one thread each.
bool KnowsCpu(const LayerRun& run) {
  return run.num_ranks == 1 || run.num_threads == 1;
}

size_t CriticalRank(const LayerRun& run, const ArmResult& arm) {
  size_t critical = 0;
  double most = -1;
  for (size_t rank = 0; rank < arm.reports[0].size(); ++rank) {
    const double ms = Median(OfRank(arm, rank, [&](const InvocationReport& r) {
      return KnowsCpu(run) ? r.backward.cpu_ms : static_cast<double>(r.backward_rows);
    }));
    if (ms > most) {
      most = ms;
      critical = rank;
    }
  }
  return critical;
}

json PhaseTable(const ArmResult& arm, size_t rank, bool backward) {
  json out;
  const auto add = [&](const char* name, double Phases::*phase) {
    out[name] = Summary(OfRank(arm, rank, [&](const InvocationReport& r) {
      return backward ? r.backward.*phase : r.forward.*phase;
    }));
  };
  if (backward) {
    add("score", &Phases::score_ms);
    add("select", &Phases::select_ms);
    add("pack", &Phases::pack_ms);
  } else {
    add("plan", &Phases::plan_ms);
    add("weights", &Phases::weights_ms);
  }
  add("dispatch", &Phases::dispatch_ms);
  add("compute", &Phases::compute_ms);
  add("return", &Phases::return_ms);
  if (backward) add("gradients", &Phases::gradients_ms);
  add("total", &Phases::total_ms);
  return out;
}

// What the transport carried under the names of a kind, over all ranks.
int64_t Carried(const ArmResult& arm, std::initializer_list<const char*> operations) {
  int64_t bytes = 0;
  for (const auto& rank : arm.sent_bytes)
    for (const char* operation : operations)
      if (const auto at = rank.find(operation); at != rank.end()) bytes += at->second;
  return bytes;
}

json WireTable(const LayerRun& run, const LayerResult& result, const ArmResult& arm) {
  WireInput input{&run.shape, &arm.execution, run.recompute_activation, {}, {}};
  for (size_t r = 0; r < result.inputs.size(); ++r) {
    input.expert_idx.push_back(result.inputs[r].expert_idx);
    input.kept.push_back(arm.kept[r]);
  }
  const std::vector<RankWire> expected = ExpectedWire(input);
  bool reported = true;  // each rank's own figures as well
  for (size_t r = 0; r < expected.size(); ++r) {
    const InvocationReport& report = arm.reports.back()[r];
    reported &= report.dispatch_bytes == expected[r].backward.dispatch &&
                report.return_bytes == expected[r].backward.return_ &&
                report.scalar_bytes == expected[r].backward.scalars;
  }
  const auto predicted = [&](WireBytes RankWire::*pass, int64_t WireBytes::*kind) {
    int64_t bytes = 0;
    for (const RankWire& rank : expected) bytes += rank.*pass.*kind;
    return bytes;
  };
  json out;
  const auto add = [&](const char* pass_name, const char* name, int64_t measured, int64_t bytes) {
    out[pass_name][name] = {{"measured", measured}, {"predicted", bytes}};
  };
  add("forward", "dispatch", Carried(arm, {"forward dispatch"}),
      predicted(&RankWire::forward, &WireBytes::dispatch));
  add("forward", "return", Carried(arm, {"forward return"}),
      predicted(&RankWire::forward, &WireBytes::return_));
  add("forward", "scalars", Carried(arm, {"forward dispatch index", "forward norms"}),
      predicted(&RankWire::forward, &WireBytes::scalars));
  add("backward", "dispatch", Carried(arm, {"backward dispatch", "backward moved rows"}),
      predicted(&RankWire::backward, &WireBytes::dispatch));
  add("backward", "return", Carried(arm, {"backward return"}),
      predicted(&RankWire::backward, &WireBytes::return_));
  add("backward", "scalars",
      Carried(arm, {"backward score check", "backward scores", "backward thresholds", "backward kept counts",
                    "backward descriptions", "backward router gradients"}),
      predicted(&RankWire::backward, &WireBytes::scalars));
  add("backward", "gradients", Carried(arm, {"replica gradients"}),
      predicted(&RankWire::backward, &WireBytes::gradients));
  bool equal = reported;
  for (const auto& pass : out)
    for (const auto& kind : pass) equal &= kind["measured"] == kind["predicted"];
  const json& backward = out["backward"];
  const double rows =
      backward["dispatch"]["measured"].get<double>() + backward["return"]["measured"].get<double>();
  const double scalars = backward["scalars"]["measured"].get<double>();
  out["scalar_share_of_backward"] = rows + scalars > 0 ? scalars / (rows + scalars) : 0;
  out["weights"] = Carried(arm, {"replica weights"});
  out["agreements"] = Carried(arm, {"agreement"});
  out["equal"] = equal;
  return out;
}

// The rank with the largest measured peak, and how far any rank is from its prediction.
json MemoryTable(const ArmResult& arm) {
  int64_t measured = 0, predicted = 0;
  double worst = 0;
  for (const auto& step : arm.reports) {
    for (const InvocationReport& report : step) {
      if (report.peak_bytes > measured) {
        measured = report.peak_bytes;
        predicted = report.predicted_bytes;
      }
      worst = std::max(worst, std::abs(static_cast<double>(report.peak_bytes - report.predicted_bytes)) /
                                  static_cast<double>(report.predicted_bytes));
    }
  }
  return {{"measured", measured}, {"predicted", predicted}, {"worst_relative_difference", worst}};
}

// What was under way and what of it was waited for, by operation; hidden is the share that was not.
json ExchangeTable(const ArmResult& arm, size_t rank) {
  std::map<std::string, std::vector<engine::ExchangeTime>> times;
  for (const auto& step : arm.exchanges)
    for (const engine::ExchangeTime& time : step[rank]) times[std::string(time.operation)].push_back(time);
  json out = json::object();
  for (const auto& [operation, steps] : times) {
    std::vector<double> under_way, waited;
    for (const engine::ExchangeTime& time : steps) {
      under_way.push_back(time.under_way_ms);
      waited.push_back(time.waited_ms);
    }
    const double all = Median(under_way), exposed = Median(waited);
    out[operation] = {{"under_way_ms", all},
                      {"waited_ms", exposed},
                      {"hidden", all > 0 ? std::max(0.0, 1 - exposed / all) : 0.0}};
  }
  return out;
}

json ArmTable(const LayerRun& run, const LayerResult& result, size_t a, double peak_gflop_per_s) {
  const ArmResult& arm = result.arms[a];
  const size_t critical = CriticalRank(run, arm);
  json out = {{"overlap", run.arms[a].overlap},
              {"exchanges", ExchangeTable(arm, critical)},
              {"policy", run.arms[a].policy},
              {"retention", run.arms[a].retention},
              {"critical_rank", critical},
              {"forward_ms", PhaseTable(arm, critical, false)},
              {"backward_ms", PhaseTable(arm, critical, true)},
              {"wire_bytes", WireTable(run, result, arm)},
              {"memory_bytes", MemoryTable(arm)}};
  int64_t routed = 0, kept = 0, moved = 0;
  for (const InvocationReport& report : arm.reports.back()) {
    routed += report.routed_rows;
    kept += report.kept_rows;
    moved += report.moved_rows;
  }
  const InvocationReport& last = arm.reports.back()[critical];
  out["rows"] = {{"routed", routed},
                 {"kept", kept},
                 {"moved", moved},
                 {"critical_rank_forward", last.forward_rows},
                 {"critical_rank_backward", last.backward_rows}};
  const LayerPlan& plan = arm.execution.plan;
  int64_t replicas = 0;
  for (const InstancePlan& instance : plan.instances) replicas += !instance.owner;
  out["replicas"] = replicas;
  out["imbalance"] = {{"before", plan.imbalance.before},
                      {"forward", plan.imbalance.forward},
                      {"backward", plan.imbalance.backward}};
  const double gflop = 1e-9 * (ForwardFlop(run.shape, routed) + BackwardFlop(run.shape, kept));
  out["gflop_per_s"] = gflop / Median(Largest(arm, TotalMs)) * 1e3;
  out["peak_gflop_per_s"] = peak_gflop_per_s;  // of one core
  if (KnowsCpu(run)) {
    out["critical_rank_cpu_ms"] = {{"forward", Summary(Largest(arm, ForwardCpu))},
                                   {"backward", Summary(OfRank(arm, critical, BackwardCpu))}};
    const double cpu_ms =
        Median(Sum(arm, [](const InvocationReport& r) { return ForwardCpu(r) + BackwardCpu(r); }));
    out["gflop_per_cpu_s"] = gflop / cpu_ms * 1e3;
    out["fraction_of_peak"] = gflop / cpu_ms * 1e3 / peak_gflop_per_s;
  } else {
    out["critical_rank_cpu_ms"] = nullptr;
  }
  double overhead = 0;
  for (const char* phase : {"score", "select", "pack"})
    overhead += out["backward_ms"][phase]["median"].get<double>();
  out["selection_share_of_backward"] = overhead / out["backward_ms"]["total"]["median"].get<double>();
  return out;
}

json Ratios(const json& arm, const json& against) {
  const auto ratio = [&](const json::json_pointer& at) -> json {
    if (arm.at(at.parent_pointer()).is_null()) return nullptr;
    return arm.at(at)["median"].get<double>() / against.at(at)["median"].get<double>();
  };
  const bool cpu = !arm["critical_rank_cpu_ms"].is_null();
  json out = {{"forward_ms", ratio("/forward_ms/total"_json_pointer)},
              {"backward_ms", ratio("/backward_ms/total"_json_pointer)}};
  out["critical_rank_forward_cpu_ms"] = cpu ? ratio("/critical_rank_cpu_ms/forward"_json_pointer) : json();
  out["critical_rank_backward_cpu_ms"] = cpu ? ratio("/critical_rank_cpu_ms/backward"_json_pointer) : json();
  return out;
}

}  // namespace

json ExchangeReport(const LayerRun& run, const LayerResult& result) {
  json out = json::array();
  for (size_t a = 0; a < result.arms.size(); ++a) {
    const ArmResult& arm = result.arms[a];
    out.push_back(
        {{"overlap", run.arms[a].overlap},
         {"policy", run.arms[a].policy},
         {"retention", run.arms[a].retention},
         {"forward_ms", Summary(OfRank(arm, 0, [](const auto& r) { return r.forward.total_ms; }))},
         {"backward_ms", Summary(OfRank(arm, 0, [](const auto& r) { return r.backward.total_ms; }))},
         {"layer_ms", Summary(OfRank(arm, 0, TotalMs))},
         {"exchanges", ExchangeTable(arm, 0)}});
  }
  return out;
}

json LayerReport(const LayerRun& run, const LayerResult& result) {
  const LayerShape& shape = run.shape;
  const Peak peak = MeasurePeak(shape.dtype == DataType::kBf16);
  json out = ArmTable(run, result, 0, peak.gflop_per_s);
  double load[1] = {0};
  getloadavg(load, 1);
  out["shape"] = {{"experts", shape.num_experts},
                  {"top_k", shape.top_k},
                  {"hidden", shape.hidden_size},
                  {"intermediate", shape.intermediate_size},
                  {"tokens", run.num_tokens},
                  {"dtype", std::string(Name(shape.dtype))},
                  {"ranks", run.num_ranks},
                  {"threads", run.num_threads},
                  {"skew", run.skew},
                  {"activation_memory", run.recompute_activation ? "recompute" : "save"},
                  {"packed_weights", result.packed_weights},
                  {"router_gradient", std::string(Name(run.router_gradient))}};
  out["run"] = {{"version", std::string(Version())},
                {"seed", run.seed},
                {"steps", run.steps},
                {"gemm_path", result.gemm_path},
                {"peak_instructions", peak.instructions},
                {"load_average", load[0]}};
  if (result.arms.size() > 1) {
    out["against"] = ArmTable(run, result, 1, peak.gflop_per_s);
    out["ratios"] = Ratios(out, out["against"]);
  }
  return out;
}

}  // namespace lrmoe::bench
