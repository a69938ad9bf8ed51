#include <algorithm>
#include <chrono>
#include <cstdio>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "kernels/cuda/device.h"
#include "tests/gpu/checks.h"
#include "tools/bench/layer_problem.h"
#include "tools/bench/layer_run.h"

namespace lrmoe::gpu {
namespace {

using kernels::Device;
using kernels::GemmGroup;
using kernels::GemmKind;
using kernels::Type;
using kernels::cuda::GemmPathRule;

// The paper's layer.
constexpr int64_t kExperts = 128, kTopK = 8, kHidden = 2048, kIntermediate = 768, kTokens = 32768;

struct Product {
  const char* name;
  GemmKind kind;
  int64_t n, k;
};
constexpr Product kProducts[] = {
    {"FC1", GemmKind::kForward, 2 * kIntermediate, kHidden},
    {"FC2", GemmKind::kForward, kHidden, kIntermediate},
    {"dphi", GemmKind::kInputGradient, kIntermediate, kHidden},
    {"dx", GemmKind::kInputGradient, kHidden, 2 * kIntermediate},
    {"dW1", GemmKind::kWeightGradient, 2 * kIntermediate, kHidden},
    {"dW2", GemmKind::kWeightGradient, kHidden, kIntermediate},
};

// Seconds of one call, the median of several after a warm-up.
template <typename Call>
double Seconds(Device& device, Call call) {
  std::vector<double> times;
  for (int i = 0; i < 9; ++i) {
    const auto start = std::chrono::steady_clock::now();
    call();
    if (!device.Wait().ok()) return 0;
    if (i >= 2)
      times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
  }
  std::nth_element(times.begin(), times.begin() + times.size() / 2, times.end());
  return times[times.size() / 2];
}

struct Operands {
  std::unique_ptr<kernels::Memory> a, b, c;
};

// Operands large enough for every product; all zero bits but the sign of nothing: rates of dense units do not
// depend on the values enough to matter here, and sums stay finite.
absl::StatusOr<Operands> MakeOperands(Device& device, int64_t rows) {
  Operands operands;
  const int64_t rows_bytes = rows * std::max(kHidden, 2 * kIntermediate) * 2;
  const int64_t weights_bytes = kExperts * 2 * kIntermediate * kHidden * 4;
  for (auto [memory, bytes] : {std::pair{&operands.a, rows_bytes},
                               {&operands.b, std::max(rows_bytes, weights_bytes)},
                               {&operands.c, std::max(rows_bytes, weights_bytes)}}) {
    LRMOE_ASSIGN_OR_RETURN(*memory, device.Reserve(bytes));
    LRMOE_RETURN_IF_ERROR((*memory)->Commit(bytes));
    device.Fill((*memory)->base(), 0x3C, bytes);  // 0.0115 in bf16
  }
  return operands;
}

std::vector<GemmGroup> Groups(const Product& p, const std::vector<int64_t>& rows, const Operands& o) {
  const bool gradient = p.kind == GemmKind::kWeightGradient;
  std::vector<GemmGroup> groups;
  int64_t first = 0;
  for (size_t e = 0; e < rows.size(); ++e) {
    const int64_t weight = static_cast<int64_t>(e) * p.n * p.k;
    groups.push_back({o.a->base() + first * (gradient ? p.n : p.k) * 2,
                      o.b->base() + (gradient ? first * p.k * 2 : weight * 2),
                      o.c->base() + (gradient ? weight * 4 : first * p.n * 2), rows[e]});
    first += rows[e];
  }
  return groups;
}

double Tflops(const Product& p, int64_t rows, double seconds) {
  return 2.0 * static_cast<double>(p.n * p.k) * static_cast<double>(rows) / seconds * 1e-12;
}

absl::Status BenchGemm(JsonMembers* json) {
  std::vector<std::string> items;
  std::printf("\n%-6s %10s %14s %14s %14s\n", "GEMM", "rows/expert", "dense TFLOP/s", "streams",
              "grouped call");
  for (const int64_t per_expert : {int64_t{16}, int64_t{64}, int64_t{256}, kTokens * kTopK / kExperts}) {
    const std::vector<int64_t> rows(kExperts, per_expert);
    const int64_t total = per_expert * kExperts;
    for (const Product& p : kProducts) {
      double rate[3] = {0, 0, 0};  // dense: all rows with one expert's weights
      for (const int way : {0, 1, 2}) {
        if (way == 2 && !kernels::cuda::GroupedIsPossible(p.kind, Type::kBf16)) continue;
        LRMOE_ASSIGN_OR_RETURN(
            const auto device,
            kernels::cuda::CreateCudaDevice(0, way == 2 ? GemmPathRule::kGrouped : GemmPathRule::kStreams));
        LRMOE_ASSIGN_OR_RETURN(const Operands operands, MakeOperands(*device, total));
        const std::vector<GemmGroup> groups =
            Groups(p, way == 0 ? std::vector<int64_t>{total} : rows, operands);
        absl::Status status;
        const double seconds =
            Seconds(*device, [&] { status = device->GroupedGemm(p.kind, Type::kBf16, p.n, p.k, groups); });
        LRMOE_RETURN_IF_ERROR(status);
        rate[way] = seconds > 0 ? Tflops(p, total, seconds) : 0;
      }
      std::printf("%-6s %10lld %14.1f %14.1f %14.1f\n", p.name, static_cast<long long>(per_expert), rate[0],
                  rate[1], rate[2]);
      items.push_back(
          Object({"\"gemm\": " + Quoted(p.name), absl::StrCat("\"rows_per_expert\": ", per_expert),
                  "\"dense_tflops\": " + Number(rate[0]), "\"streams_tflops\": " + Number(rate[1]),
                  "\"grouped_tflops\": " + Number(rate[2])}));
    }
  }
  json->push_back("\"gemm\": " + Array(items));
  return absl::OkStatus();
}

// Of the steps' reports of the only rank.
double Median(const bench::ArmResult& arm, double (*of)(const InvocationReport&)) {
  std::vector<double> values;
  for (const auto& step : arm.reports) values.push_back(of(step[0]));
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

bench::LayerRun PaperLayer() {
  bench::LayerRun run;
  run.shape.num_experts = kExperts;
  run.shape.top_k = kTopK;
  run.shape.hidden_size = kHidden;
  run.shape.intermediate_size = kIntermediate;
  run.shape.dtype = DataType::kBf16;
  run.num_tokens = kTokens;
  run.rows_on_device = true;
  run.steps = 10;
  for (const double retention : {1.0, 0.9, 0.8, 0.7}) run.arms.push_back({"lrmoe", retention});
  run.make_device = [] { return kernels::cuda::CreateCudaDevice(0); };
  run.make_transports = Loopback;
  return run;
}

// What the layer takes, and, in a second run that waits for the device between its phases, what they take.
absl::Status BenchLayer(JsonMembers* json) {
  bench::LayerRun run = PaperLayer();
  LRMOE_ASSIGN_OR_RETURN(const bench::LayerResult whole, bench::RunLayer(run));
  run.wait_between_phases = true;
  LRMOE_ASSIGN_OR_RETURN(const bench::LayerResult parts, bench::RunLayer(run));
  std::printf("\nLayer E %lld, k %lld, H %lld, F %lld, %lld tokens in device memory; milliseconds\n",
              static_cast<long long>(kExperts), static_cast<long long>(kTopK),
              static_cast<long long>(kHidden), static_cast<long long>(kIntermediate),
              static_cast<long long>(kTokens));
  std::printf("%-6s %10s %10s | %10s %10s %10s %12s | %10s %10s\n", "rho", "forward", "backward", "GEMMs",
              "selection", "pack", "share of it", "peak MiB", "model MiB");
  std::vector<std::string> items;
  for (size_t i = 0; i < run.arms.size(); ++i) {
    const double forward =
        Median(whole.arms[i], [](const InvocationReport& r) { return r.forward.total_ms; });
    const double backward =
        Median(whole.arms[i], [](const InvocationReport& r) { return r.backward.total_ms; });
    const bench::ArmResult& arm = parts.arms[i];
    const double compute = Median(arm, [](const InvocationReport& r) { return r.backward.compute_ms; });
    const double selection =
        Median(arm, [](const InvocationReport& r) { return r.backward.score_ms + r.backward.select_ms; });
    const double pack = Median(arm, [](const InvocationReport& r) { return r.backward.pack_ms; });
    const double total = Median(arm, [](const InvocationReport& r) { return r.backward.total_ms; });
    const InvocationReport& last = whole.arms[i].reports.back()[0];
    std::printf("%-6.2f %10.2f %10.2f | %10.2f %10.2f %10.2f %10.1f %% | %10.1f %10.1f\n",
                run.arms[i].retention, forward, backward, compute, selection, pack,
                100 * (selection + pack) / total, static_cast<double>(last.peak_bytes) / (1 << 20),
                static_cast<double>(last.predicted_bytes) / (1 << 20));
    items.push_back(
        Object({"\"retention\": " + Number(run.arms[i].retention), "\"forward_ms\": " + Number(forward),
                "\"backward_ms\": " + Number(backward), "\"backward_compute_ms\": " + Number(compute),
                "\"selection_ms\": " + Number(selection), "\"pack_ms\": " + Number(pack),
                "\"phases_total_ms\": " + Number(total), absl::StrCat("\"kept_rows\": ", last.kept_rows),
                absl::StrCat("\"peak_bytes\": ", last.peak_bytes),
                absl::StrCat("\"predicted_bytes\": ", last.predicted_bytes)}));
  }
  json->push_back("\"layer\": " + Array(items));
  return absl::OkStatus();
}

}  // namespace

absl::Status RunBench(JsonMembers* json) {
  LRMOE_RETURN_IF_ERROR(BenchGemm(json));
  return BenchLayer(json);
}

}  // namespace lrmoe::gpu
