// The workload and the machine behind the paper's Figures 6 to 8, and policies planned on them.
//
// Stated by the paper: 8 GPUs, EP8, bf16, E = 128, k = 8, H = 2048, F = 768, 32,768 tokens per GPU; 80 GiB of
// memory of which 64 are resident; LRMoE's bars. Derived from it, once for all policies: see Assumptions().
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/plan.h"
#include "controller/planner/problem.h"

namespace lrmoe::sim {

struct FigureOptions {
  std::vector<std::string> policies;
  int32_t num_seeds = 4;      // workloads with the same popularity on other experts
  int32_t replica_slots = 2;  // of every rank, for every policy
  double imbalance = 1.65;    // of the most loaded rank under fixed ownership
  double retention = 0.7;     // of the policies that drop rows, in Figures 7 and 8
  bool keep_residents = true;
  uint64_t seed = 1;
};

inline constexpr int32_t kFigureRanks = 8, kFigureExperts = 128, kFigureTopK = 8;
inline constexpr int64_t kFigureTokens = 32768;  // per rank
inline constexpr int64_t kGiB = int64_t{1} << 30;
inline constexpr int64_t kFigureBudget = 16 * kGiB;  // for token buffers and replicas
inline constexpr double kIdealLimit = 16;  // batch multiplier at which balance alone reaches the budget

// Effective speeds, from LRMoE's bar of Figure 8 at 70 % of the rows and perfect balance: 7.26 ms for the
// GEMMs of 183,501 rows (2 x 2 x 3 H F operations each), 2.58 + 2.85 ms for 7/8 of those rows there and back.
double ComputeTflops();
double LinkGbPerS();

// Whether a policy's backward pass may drop rows; every other one keeps all.
bool DropsRows(const std::string& policy);

// Tokens per rank that batch multiplier 1 stands for: with kIdealLimit times as many, perfectly balanced, all
// kept and without replicas, token buffers take kFigureBudget.
int64_t TokensOfUnit();

// The Zipf exponent at which fixed ownership has this imbalance for this seed. InvalidArgument when none
// below 10 has.
absl::StatusOr<double> SolveAlpha(double imbalance, uint64_t seed);

// One planned invocation.
struct PlannedStep {
  planner::PlanningProblem problem;
  LayerPlan plan;
};

// A policy in a given situation.
struct FigureCase {
  std::string policy;
  uint64_t seed = 0;
  double alpha = 0;
  int64_t tokens = kFigureTokens;  // per rank
  int64_t memory_bytes = 0;        // of a rank for the layer; 0: no limit
  std::vector<double> rates = {1.0};
};

// The invocations after two of warm-up, which history and residents come from. A plan that does not fit has
// feasible = false.
absl::StatusOr<std::vector<PlannedStep>> PlanSteps(const FigureOptions& options, const FigureCase& which);

// The seeds of a run with their exponents, solved.
struct FigureSeed {
  uint64_t seed = 0;
  double alpha = 0;
};
absl::StatusOr<std::vector<FigureSeed>> SolveSeeds(const FigureOptions& options);

// Every assumption, for people: what all three figures share.
std::vector<std::string> Assumptions(const FigureOptions& options, const std::vector<FigureSeed>& seeds);

}  // namespace lrmoe::sim
