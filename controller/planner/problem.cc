#include "controller/planner/problem.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "controller/planner/policies/policies.h"

namespace lrmoe::planner {
namespace {

constexpr int32_t kMaxRanks = 1024;
constexpr int32_t kMaxExperts = 4096;
constexpr int64_t kMaxCount = int64_t{1} << 40;
constexpr size_t kMaxHistory = 8;

template <typename Value>
absl::Status Bad(const std::string& field, Value value, absl::string_view allowed) {
  return absl::InvalidArgumentError(absl::StrCat(field, " is ", value, "; allowed: ", allowed));
}

std::string At(absl::string_view field, int64_t idx) {
  return absl::StrCat(field, "[", idx, "]");
}

absl::Status ValidateCounts(const RoutedCounts& counts) {
  if (counts.num_sources() < 1 || counts.num_sources() > kMaxRanks)
    return Bad("counts", absl::StrCat(counts.num_sources(), " sources"), "1..1024 sources");
  if (counts.num_experts() < 1 || counts.num_experts() > kMaxExperts)
    return Bad("counts", absl::StrCat(counts.num_experts(), " experts"), "1..4096 experts");
  int64_t total = 0;
  for (int32_t s = 0; s < counts.num_sources(); ++s) {
    const auto row = counts.source(s);
    int64_t lowest = 0, highest = 0;
    for (int64_t n : row) lowest = std::min(lowest, n), highest = std::max(highest, n);
    if (lowest < 0 || highest > kMaxCount) {
      for (int32_t e = 0; e < counts.num_experts(); ++e)
        if (row[e] < 0 || row[e] > kMaxCount)
          return Bad(absl::StrCat(At("counts", s), "[", e, "]"), row[e], "0..2^40");
    }
    for (int64_t n : row) total += n;  // at most 2^10 x 2^12 x 2^40
    if (total > kMaxCount * counts.num_sources())
      return Bad("counts", absl::StrCat("a total above ", total - 1), "a total up to 2^40 x ranks");
  }
  return absl::OkStatus();
}

absl::Status ValidateRank(const RankResources& rank, int64_t idx) {
  const std::string at = At("ranks", idx);
  if (rank.node < 0) return Bad(at + ".node", rank.node, "0..2147483647");
  if (rank.replica_slots < 0 || rank.replica_slots > kMaxExperts)
    return Bad(at + ".replica_slots", rank.replica_slots, "0..4096");
  if (rank.memory_bytes < 0) return Bad(at + ".memory_bytes", rank.memory_bytes, "0..9223372036854775807");
  // The bounds keep the ratio of two rates, and a load divided by it, exact enough to compare.
  if (!(rank.rows_per_ms >= 1e-3 && rank.rows_per_ms <= 1e9))
    return Bad(at + ".rows_per_ms", rank.rows_per_ms, "0.001..1e9");
  return absl::OkStatus();
}

absl::Status ValidateResidents(const PlanningProblem& problem) {
  const int32_t num_experts = problem.counts.num_experts();
  if (problem.resident.empty()) return absl::OkStatus();
  if (problem.resident.size() != problem.cluster.ranks.size())
    return Bad("resident", absl::StrCat(problem.resident.size(), " lists"),
               absl::StrCat("none, or one per rank (", problem.cluster.ranks.size(), ")"));
  const PolicyInfo* policy = FindPolicy(problem.policy.planner);
  const bool moves_owners = policy != nullptr && policy->moves_owners;
  for (size_t g = 0; g < problem.resident.size(); ++g) {
    const auto& list = problem.resident[g];
    const int32_t slots = problem.cluster.ranks[g].replica_slots;
    const int64_t owned =
        moves_owners ? std::count(problem.owner.begin(), problem.owner.end(), static_cast<int32_t>(g)) : 0;
    if (static_cast<int64_t>(list.size()) > slots + owned)
      return Bad(At("resident", g), absl::StrCat(list.size(), " experts"),
                 absl::StrCat("up to ", slots + owned, ", the rank's replica_slots",
                              moves_owners ? " and owned experts" : ""));
    for (size_t i = 0; i < list.size(); ++i) {
      const std::string at = absl::StrCat(At("resident", g), "[", i, "]");
      if (list[i] < 0 || list[i] >= num_experts)
        return Bad(at, list[i], absl::StrCat("0..", num_experts - 1));
      if (i > 0 && list[i] <= list[i - 1]) return Bad(at, list[i], "ascending, distinct experts");
      if (problem.owner[list[i]] == static_cast<int32_t>(g))
        return Bad(at, list[i], "experts that the rank does not own");
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateHistory(const PlanningProblem& problem) {
  const int32_t num_experts = problem.counts.num_experts();
  const int64_t most = kMaxCount * problem.counts.num_sources();
  if (problem.history.size() > kMaxHistory)
    return Bad("history", absl::StrCat(problem.history.size(), " invocations"), "up to 8");
  for (size_t i = 0; i < problem.history.size(); ++i) {
    const std::vector<int64_t>& counts = problem.history[i];
    if (counts.size() != static_cast<size_t>(num_experts))
      return Bad(At("history", i), absl::StrCat(counts.size(), " entries"),
                 absl::StrCat("one per column of counts (", num_experts, ")"));
    int64_t total = 0;
    for (int32_t e = 0; e < num_experts; ++e) {
      if (counts[e] < 0 || counts[e] > most)
        return Bad(absl::StrCat(At("history", i), "[", e, "]"), counts[e], "0..2^40 x ranks");
      total += counts[e];  // at most 2 x 2^50: checked at every step
      if (total > most)
        return Bad(At("history", i), absl::StrCat("a total above ", most), "a total up to 2^40 x ranks");
    }
  }
  return absl::OkStatus();
}

absl::Status ValidateModel(const MemoryModelOptions& model) {
  if (model.hidden_size < 1 || model.hidden_size > 65536)
    return Bad("model.hidden_size", model.hidden_size, "1..65536");
  if (model.intermediate_size < 1 || model.intermediate_size > 262144)
    return Bad("model.intermediate_size", model.intermediate_size, "1..262144");
  if (model.weight_bytes < 1 || model.weight_bytes > 8)
    return Bad("model.weight_bytes", model.weight_bytes, "1..8");
  if (model.gradient_bytes < 1 || model.gradient_bytes > 8)
    return Bad("model.gradient_bytes", model.gradient_bytes, "1..8");
  return absl::OkStatus();
}

}  // namespace

absl::Status Validate(const PlanningProblem& problem) {
  LRMOE_RETURN_IF_ERROR(ValidateCounts(problem.counts));
  const int32_t num_ranks = problem.counts.num_sources();
  const int32_t num_experts = problem.counts.num_experts();
  if (problem.cluster.ranks.size() != static_cast<size_t>(num_ranks))
    return Bad("ranks", absl::StrCat(problem.cluster.ranks.size(), " entries"),
               absl::StrCat("one per row of counts (", num_ranks, ")"));
  for (int32_t g = 0; g < num_ranks; ++g) LRMOE_RETURN_IF_ERROR(ValidateRank(problem.cluster.ranks[g], g));
  const Bandwidth& bandwidth = problem.cluster.bandwidth;
  if (!(bandwidth.intra_node_gb_per_s > 0) || std::isinf(bandwidth.intra_node_gb_per_s))
    return Bad("bandwidth.intra_node_gb_per_s", bandwidth.intra_node_gb_per_s, "a finite number > 0");
  if (!(bandwidth.inter_node_gb_per_s > 0) || std::isinf(bandwidth.inter_node_gb_per_s))
    return Bad("bandwidth.inter_node_gb_per_s", bandwidth.inter_node_gb_per_s, "a finite number > 0");
  if (problem.owner.size() != static_cast<size_t>(num_experts))
    return Bad("owner", absl::StrCat(problem.owner.size(), " entries"),
               absl::StrCat("one per column of counts (", num_experts, ")"));
  for (int32_t e = 0; e < num_experts; ++e)
    if (problem.owner[e] < 0 || problem.owner[e] >= num_ranks)
      return Bad(At("owner", e), problem.owner[e], absl::StrCat("0..", num_ranks - 1));
  LRMOE_RETURN_IF_ERROR(ValidateResidents(problem));
  LRMOE_RETURN_IF_ERROR(ValidateHistory(problem));
  LRMOE_RETURN_IF_ERROR(ValidateModel(problem.model));
  // Policies that only a simulation can run are no planners of a job, but legal here.
  if (FindPolicy(problem.policy.planner) == nullptr) {
    std::vector<absl::string_view> names;
    for (const PolicyInfo& info : AllPolicies()) names.push_back(info.name);
    return Bad("planner", absl::StrCat("\"", problem.policy.planner, "\""), absl::StrJoin(names, ", "));
  }
  Policy policy = problem.policy;
  policy.planner = "lrmoe";
  return lrmoe::Validate(policy);
}

}  // namespace lrmoe::planner
