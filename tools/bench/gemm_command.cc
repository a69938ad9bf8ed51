// lrmoe-bench gemm: grouped GEMMs against the same work in one group and against the peak.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <iostream>
#include <nlohmann/json.hpp>
#include <numeric>
#include <vector>

#include "common/check.h"
#include "common/random.h"
#include "kernels/kernels.h"
#include "tools/bench/commands.h"
#include "tools/bench/measure.h"
#include "tools/bench/peak.h"

namespace lrmoe::bench {
namespace {

using kernels::GemmKind;
using kernels::Type;

struct Options {
  int experts = 16;
  int64_t hidden = 256, intermediate = 128, rows = 8192;
  double skew = 1.0;
  std::string dtype = "bf16", packed_weights = "auto", output = "table";
  bool accumulate = false;
  int threads = 1, repetitions = 5;
};

// The six products of a gated layer; n and k as in kernels::GemmKind.
struct Phase {
  const char* name;
  bool forward;
  GemmKind kind;
  int64_t n, k;
};
std::vector<Phase> PhasesOf(const Options& o) {
  const int64_t h = o.hidden, f = o.intermediate;
  return {
      {"fc1", true, GemmKind::kForward, 2 * f, h},       {"fc2", true, GemmKind::kForward, h, f},
      {"dphi", false, GemmKind::kInputGradient, f, h},   {"dw2", false, GemmKind::kWeightGradient, h, f},
      {"dx", false, GemmKind::kInputGradient, h, 2 * f}, {"dw1", false, GemmKind::kWeightGradient, 2 * f, h}};
}

// rows of expert i proportional to (i + 1)^-skew, the remainder to the first experts.
std::vector<int64_t> ZipfRows(const Options& o) {
  std::vector<double> weight(o.experts);
  for (int i = 0; i < o.experts; ++i) weight[i] = std::pow(i + 1.0, -o.skew);
  const double total = std::accumulate(weight.begin(), weight.end(), 0.0);
  std::vector<int64_t> rows(o.experts);
  for (int i = 0; i < o.experts; ++i)
    rows[i] = static_cast<int64_t>(static_cast<double>(o.rows) * weight[i] / total);
  const int64_t missing = o.rows - std::accumulate(rows.begin(), rows.end(), int64_t{0});
  for (int64_t i = 0; i < missing; ++i) ++rows[i % o.experts];
  return rows;
}

// Cheap values in [-0.5, 0.5): what a GEMM takes does not depend on them as long as none is denormal.
void Fill(Type type, std::vector<std::byte>& bytes) {
  Random random(1);
  for (size_t i = 0; i < bytes.size(); i += SizeOf(type)) {
    const float value = static_cast<float>(random.Uniform() - 0.5);
    std::memcpy(&bytes[i], reinterpret_cast<const char*>(&value) + (4 - SizeOf(type)), SizeOf(type));
  }
}

struct Result {
  Timing grouped, one_group;
  double gflop = 0;
};

// The weights of `count` experts packed in place for `kind`, as an engine holds them.
void Pack(kernels::Device& device, Type type, const Phase& phase, int64_t count, std::vector<std::byte>& b) {
  const int64_t bytes = phase.n * phase.k * SizeOf(type);
  std::vector<std::byte> plain(bytes);
  for (int64_t e = 0; e < count; ++e) {
    std::copy_n(&b[e * bytes], bytes, plain.begin());
    device.PackWeights(phase.kind, type, phase.n, phase.k, plain.data(), &b[e * bytes]);
  }
}

bool CanPack(const kernels::Device& device, Type type, const Options& o) {
  return o.packed_weights == "auto" && device.PacksWeights(type) &&
         o.hidden % kernels::kPackedMultiple == 0 && o.intermediate % kernels::kPackedMultiple == 0;
}

// Operands of every expert lie behind one another; the single group uses the first expert's weights for all
// rows.
Result MeasurePhase(kernels::Device& device, const Options& o, const Phase& phase,
                    const std::vector<int64_t>& rows) {
  const Type type = o.dtype == "bf16" ? Type::kBf16 : Type::kFp32;
  const bool weight_gradient = phase.kind == GemmKind::kWeightGradient;
  const int64_t total = std::accumulate(rows.begin(), rows.end(), int64_t{0});
  const int64_t weights = phase.n * phase.k, experts = static_cast<int64_t>(rows.size());
  const int64_t a_width = weight_gradient ? phase.n : phase.k;
  const int64_t size = SizeOf(type);
  std::vector<std::byte> a(total * a_width * size),
      b((weight_gradient ? total * phase.k : experts * weights) * size);
  std::vector<std::byte> c(weight_gradient ? experts * weights * 4 : total * phase.n * size);
  Fill(type, a);
  Fill(type, b);
  const bool packed = !weight_gradient && CanPack(device, type, o);
  if (packed) Pack(device, type, phase, experts, b);
  const GemmKind kind = packed ? GemmKind::kPacked : phase.kind;
  std::vector<kernels::GemmGroup> groups;
  int64_t row = 0;
  for (int64_t e = 0; e < experts; row += rows[e], ++e) {
    groups.push_back({&a[row * a_width * size], &b[(weight_gradient ? row * phase.k : e * weights) * size],
                      &c[weight_gradient ? e * weights * 4 : row * phase.n * size], rows[e], !o.accumulate});
  }
  const kernels::GemmGroup one{a.data(), b.data(), c.data(), total, !o.accumulate};
  Result result;
  const auto run = [&](std::span<const kernels::GemmGroup> work) {
    const absl::Status status = device.GroupedGemm(kind, type, phase.n, phase.k, work);
    if (!status.ok()) CheckFailed(__FILE__, __LINE__, std::string(status.message()));
  };
  run(groups);
  for (int i = 0; i < o.repetitions; ++i) {
    Measure([&] { run(groups); }, result.grouped);
    Measure([&] { run({&one, 1}); }, result.one_group);
  }
  result.gflop = 2e-9 * static_cast<double>(total * phase.n * phase.k);
  return result;
}

nlohmann::json ToJson(const Result& r, double peak_gflop_per_cpu_s) {
  return {{"grouped_ms", r.grouped.ms},
          {"grouped_cpu_ms", r.grouped.cpu_ms},
          {"one_group_ms", r.one_group.ms},
          {"one_group_cpu_ms", r.one_group.cpu_ms},
          {"ratio", r.grouped.ms / r.one_group.ms},
          {"cpu_ratio", r.grouped.cpu_ms / r.one_group.cpu_ms},
          {"grouped_gflop_per_s", r.gflop / r.grouped.ms * 1e3},
          {"fraction_of_peak", r.gflop / r.grouped.cpu_ms * 1e3 / peak_gflop_per_cpu_s}};
}

void PrintTable(const nlohmann::json& out) {
  std::printf(
      "%s\nE %d  H %d  F %d  rows %d  skew %.2f  %s  %s weights  threads %d  peak %.1f GFLOP/s per core "
      "(%s)\n",
      out["gemm_path"].get<std::string>().c_str(), out["experts"].get<int>(), out["hidden"].get<int>(),
      out["intermediate"].get<int>(), out["rows"].get<int>(), out["skew"].get<double>(),
      out["dtype"].get<std::string>().c_str(), out["packed_weights"].get<bool>() ? "packed" : "plain",
      out["threads"].get<int>(), out["peak_gflop_per_s"].get<double>(),
      out["peak_instructions"].get<std::string>().c_str());
  std::printf("%-10s %12s %14s %7s %16s %18s %10s %10s\n", "phase", "grouped ms", "one group ms", "ratio",
              "grouped cpu ms", "one group cpu ms", "cpu ratio", "of peak");
  for (const auto& [name, p] : out["phases"].items()) {
    std::printf("%-10s %12.2f %14.2f %7.3f %16.2f %18.2f %10.3f %9.1f%%\n", name.c_str(),
                p["grouped_ms"].get<double>(), p["one_group_ms"].get<double>(), p["ratio"].get<double>(),
                p["grouped_cpu_ms"].get<double>(), p["one_group_cpu_ms"].get<double>(),
                p["cpu_ratio"].get<double>(), 100 * p["fraction_of_peak"].get<double>());
  }
}

int Run(const Options& o) {
  if (!std::isfinite(o.skew)) {  // NaN is in every CLI::Range
    std::cerr << "lrmoe-bench gemm: --skew is " << o.skew << "; allowed: 0..4\n";
    return 2;
  }
  auto device = kernels::CreateCpuDevice(o.threads);
  if (!device.ok()) {
    std::cerr << "lrmoe-bench gemm: " << device.status().message() << "\n";
    return 1;
  }
  const Type type = o.dtype == "bf16" ? Type::kBf16 : Type::kFp32;
  const Peak peak = MeasurePeak(type == Type::kBf16);
  const std::vector<int64_t> rows = ZipfRows(o);
  nlohmann::json out = {{"experts", o.experts},
                        {"hidden", o.hidden},
                        {"intermediate", o.intermediate},
                        {"rows", o.rows},
                        {"skew", o.skew},
                        {"dtype", o.dtype},
                        {"packed_weights", CanPack(**device, type, o)},
                        {"threads", o.threads},
                        {"gemm_path", std::string((*device)->gemm_path())},
                        {"peak_instructions", peak.instructions},
                        {"peak_gflop_per_s", peak.gflop_per_s}};
  Result forward{{0, 0}, {0, 0}, 0}, backward = forward;
  for (const Phase& phase : PhasesOf(o)) {
    const Result result = MeasurePhase(**device, o, phase, rows);
    Result& sum = phase.forward ? forward : backward;
    sum.grouped += result.grouped;
    sum.one_group += result.one_group;
    sum.gflop += result.gflop;
    out["phases"][phase.name] = ToJson(result, peak.gflop_per_s);
  }
  out["phases"]["forward"] = ToJson(forward, peak.gflop_per_s);
  out["phases"]["backward"] = ToJson(backward, peak.gflop_per_s);
  if (o.output == "json") {
    std::cout << out.dump(2) << "\n";
  } else {
    PrintTable(out);
  }
  return 0;
}

}  // namespace

void AddGemmCommand(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("gemm", "Grouped GEMMs against one big GEMM and the machine's peak");
  auto options = std::make_shared<Options>();
  command->add_option("--experts", options->experts)->check(CLI::Range(1, 4096))->capture_default_str();
  command->add_option("--hidden", options->hidden)->check(CLI::Range(1, 65536))->capture_default_str();
  command->add_option("--intermediate", options->intermediate)
      ->check(CLI::Range(1, 262144))
      ->capture_default_str();
  command->add_option("--rows", options->rows, "rows of all experts together")
      ->check(CLI::Range(1, 1 << 24))
      ->capture_default_str();
  command->add_option("--skew", options->skew, "Zipf exponent of the rows per expert")
      ->check(CLI::Range(0.0, 4.0))
      ->capture_default_str();
  command->add_option("--dtype", options->dtype)
      ->check(CLI::IsMember({"bf16", "fp32"}))
      ->capture_default_str();
  command
      ->add_option("--packed-weights", options->packed_weights,
                   "auto: packed where the device and the sizes allow; off: as they are")
      ->check(CLI::IsMember({"auto", "off"}))
      ->capture_default_str();
  command->add_flag("--accumulate", options->accumulate,
                    "weight gradients are added to, as after the first micro-batch of a step");
  command->add_option("--threads", options->threads)->check(CLI::Range(1, 256))->capture_default_str();
  command->add_option("--repetitions", options->repetitions)
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--output", options->output)
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  command->callback([options, &exit_code] { exit_code = Run(*options); });
}

}  // namespace lrmoe::bench
