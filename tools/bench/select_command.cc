// lrmoe-bench select: exact top-K of many groups of scores.
#include <algorithm>
#include <bit>
#include <cstdio>
#include <functional>
#include <iostream>
#include <nlohmann/json.hpp>
#include <vector>

#include "common/check.h"
#include "common/random.h"
#include "kernels/top_k.h"
#include "tools/bench/commands.h"
#include "tools/bench/measure.h"

namespace lrmoe::bench {
namespace {

struct Options {
  int64_t scores = 1 << 20, groups = 128;
  double keep = 0.5;
  int repetitions = 5;
  std::string output = "table";
};

// The k-th largest of each group by `method`, which may reorder its copy.
template <typename Method>
double SumOfThresholds(const std::vector<float>& scores, const Options& o, Method method) {
  double sum = 0;
  for (int64_t g = 0; g < o.groups; ++g) {
    const int64_t begin = g * o.scores / o.groups, end = (g + 1) * o.scores / o.groups;
    const auto k = static_cast<int64_t>(o.keep * static_cast<double>(end - begin));
    if (k > 0) sum += method(std::span(scores).subspan(begin, end - begin), k);
  }
  return sum;
}

int Run(const Options& o) {
  Random random(1);
  std::vector<float> scores(o.scores);
  for (float& score : scores) {  // a product of uniforms: many magnitudes, like real scores
    score = static_cast<float>(random.Uniform() * random.Uniform() * random.Uniform());
  }
  Timing radix, partial, sorted;
  double sums[3] = {};
  std::vector<float> copy;
  std::vector<uint32_t> scratch(o.scores);
  for (int i = 0; i < o.repetitions; ++i) {
    Measure(
        [&] {
          sums[0] = SumOfThresholds(scores, o, [&](std::span<const float> group, int64_t k) {
            std::transform(group.begin(), group.end(), scratch.begin(), kernels::KeyOf);
            return std::bit_cast<float>(kernels::KthLargestKey(std::span(scratch).first(group.size()), k));
          });
        },
        radix);
    Measure(
        [&] {
          sums[1] = SumOfThresholds(scores, o, [&](std::span<const float> group, int64_t k) {
            copy.assign(group.begin(), group.end());
            std::nth_element(copy.begin(), copy.begin() + (k - 1), copy.end(), std::greater<>());
            return copy[k - 1];
          });
        },
        partial);
    Measure(
        [&] {
          sums[2] = SumOfThresholds(scores, o, [&](std::span<const float> group, int64_t k) {
            copy.assign(group.begin(), group.end());
            std::sort(copy.begin(), copy.end(), std::greater<>());
            return copy[k - 1];
          });
        },
        sorted);
  }
  LRMOE_CHECK_EQ(sums[0], sums[1]);
  LRMOE_CHECK_EQ(sums[0], sums[2]);
  const nlohmann::json out = {{"scores", o.scores},
                              {"groups", o.groups},
                              {"keep", o.keep},
                              {"select_ms", radix.ms},
                              {"select_cpu_ms", radix.cpu_ms},
                              {"nth_element_cpu_ms", partial.cpu_ms},
                              {"sort_cpu_ms", sorted.cpu_ms}};
  if (o.output == "json") {
    std::cout << out.dump(2) << "\n";
  } else {
    std::printf(
        "%lld scores in %lld groups, keep %.2f, cpu ms: radix select %.2f, nth_element %.2f, sort %.2f\n",
        static_cast<long long>(o.scores), static_cast<long long>(o.groups), o.keep, radix.cpu_ms,
        partial.cpu_ms, sorted.cpu_ms);
  }
  return 0;
}

}  // namespace

void AddSelectCommand(CLI::App& app, int& exit_code) {
  auto* command = app.add_subcommand("select", "Exact top-K of many groups of scores");
  auto options = std::make_shared<Options>();
  command->add_option("--scores", options->scores)->check(CLI::Range(1, 1 << 28))->capture_default_str();
  command->add_option("--groups", options->groups)->check(CLI::Range(1, 1 << 20))->capture_default_str();
  command->add_option("--keep", options->keep, "fraction kept")
      ->check(CLI::Range(0.0, 1.0))
      ->capture_default_str();
  command->add_option("--repetitions", options->repetitions)
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  command->add_option("--output", options->output)
      ->check(CLI::IsMember({"table", "json"}))
      ->capture_default_str();
  command->callback([options, &exit_code] { exit_code = Run(*options); });
}

}  // namespace lrmoe::bench
