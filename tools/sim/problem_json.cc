#include "tools/sim/problem_json.h"

#include <limits>
#include <nlohmann/json.hpp>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/json_fields.h"
#include "common/status_macros.h"

namespace lrmoe::sim {
namespace {

using Json = nlohmann::json;
using planner::PlanningProblem;

absl::Status ReadCounts(const Json& value, PlanningProblem& problem) {
  LRMOE_RETURN_IF_ERROR(CheckList("counts", value, 1024));
  if (value.empty()) return BadField("counts", value, "1..1024 lists, one per source rank");
  for (size_t s = 0; s < value.size(); ++s) {
    const std::string field = absl::StrCat("counts[", s, "]");
    LRMOE_RETURN_IF_ERROR(CheckList(field, value[s], 4096));
    if (value[s].empty() || value[s].size() != value[0].size())
      return absl::InvalidArgumentError(
          absl::StrCat(field, " is a list of ", value[s].size(), " values; allowed: ",
                       value[0].empty() ? "1..4096" : absl::StrCat(value[0].size()), ", one per expert"));
    if (s == 0)
      problem.counts =
          RoutedCounts(static_cast<int32_t>(value.size()), static_cast<int32_t>(value[0].size()));
    for (size_t e = 0; e < value[s].size(); ++e)
      LRMOE_RETURN_IF_ERROR(ReadInteger(absl::StrCat(field, "[", e, "]"), value[s][e], 0, int64_t{1} << 40,
                                        problem.counts.at(static_cast<int32_t>(s), static_cast<int32_t>(e))));
  }
  return absl::OkStatus();
}

absl::Status ReadRanks(const Json& value, PlanningProblem& problem) {
  LRMOE_RETURN_IF_ERROR(CheckList("ranks", value, 1024));
  for (size_t g = 0; g < value.size(); ++g) {
    const std::string field = absl::StrCat("ranks[", g, "]");
    LRMOE_RETURN_IF_ERROR(
        CheckKeys(field, value[g], {"node", "replica_slots", "memory_bytes", "rows_per_ms"}));
    RankResources rank;
    for (const auto& [key, item] : value[g].items()) {
      const std::string at = field + "." + key;
      if (key == "node") LRMOE_RETURN_IF_ERROR(ReadInteger32(at, item, 0, rank.node));
      if (key == "replica_slots") LRMOE_RETURN_IF_ERROR(ReadInteger32(at, item, 0, rank.replica_slots));
      if (key == "memory_bytes")
        LRMOE_RETURN_IF_ERROR(
            ReadInteger(at, item, 0, std::numeric_limits<int64_t>::max(), rank.memory_bytes));
      if (key == "rows_per_ms") LRMOE_RETURN_IF_ERROR(ReadNumber(at, item, rank.rows_per_ms));
    }
    problem.cluster.ranks.push_back(rank);
  }
  return absl::OkStatus();
}

absl::Status ReadExperts(const std::string& field, const Json& value, std::vector<int32_t>& out) {
  LRMOE_RETURN_IF_ERROR(CheckList(field, value, 4096));
  for (size_t i = 0; i < value.size(); ++i)
    LRMOE_RETURN_IF_ERROR(ReadInteger32(absl::StrCat(field, "[", i, "]"), value[i], 0, out.emplace_back()));
  return absl::OkStatus();
}

absl::Status ReadResident(const Json& value, PlanningProblem& problem) {
  LRMOE_RETURN_IF_ERROR(CheckList("resident", value, 1024));
  for (size_t g = 0; g < value.size(); ++g)
    LRMOE_RETURN_IF_ERROR(
        ReadExperts(absl::StrCat("resident[", g, "]"), value[g], problem.resident.emplace_back()));
  return absl::OkStatus();
}

absl::Status ReadHistory(const Json& value, PlanningProblem& problem) {
  LRMOE_RETURN_IF_ERROR(CheckList("history", value, 8));
  for (size_t i = 0; i < value.size(); ++i) {
    const std::string field = absl::StrCat("history[", i, "]");
    LRMOE_RETURN_IF_ERROR(CheckList(field, value[i], 4096));
    std::vector<int64_t>& counts = problem.history.emplace_back();
    for (size_t e = 0; e < value[i].size(); ++e)
      LRMOE_RETURN_IF_ERROR(ReadInteger(absl::StrCat(field, "[", e, "]"), value[i][e], 0, int64_t{1} << 50,
                                        counts.emplace_back()));
  }
  return absl::OkStatus();
}

absl::Status ReadModel(const Json& value, MemoryModelOptions& model) {
  LRMOE_RETURN_IF_ERROR(CheckKeys("model", value,
                                  {"hidden_size", "intermediate_size", "gated", "weight_bytes",
                                   "gradient_bytes", "packs_weights", "optimizer_on_device"}));
  for (const auto& [key, item] : value.items()) {
    const std::string at = "model." + key;
    if (key == "hidden_size") LRMOE_RETURN_IF_ERROR(ReadInteger32(at, item, 0, model.hidden_size));
    if (key == "intermediate_size")
      LRMOE_RETURN_IF_ERROR(ReadInteger32(at, item, 0, model.intermediate_size));
    if (key == "weight_bytes") LRMOE_RETURN_IF_ERROR(ReadInteger(at, item, 1, 8, model.weight_bytes));
    if (key == "gradient_bytes") LRMOE_RETURN_IF_ERROR(ReadInteger(at, item, 1, 8, model.gradient_bytes));
    bool* const flag = key == "gated"                 ? &model.gated
                       : key == "packs_weights"       ? &model.packs_weights
                       : key == "optimizer_on_device" ? &model.optimizer_on_device
                                                      : nullptr;
    if (flag == nullptr) continue;
    if (!item.is_boolean()) return BadField(at, item, "true, false");
    *flag = item.get<bool>();
  }
  return absl::OkStatus();
}

absl::Status ReadBandwidth(const Json& value, Bandwidth& bandwidth) {
  LRMOE_RETURN_IF_ERROR(CheckKeys("bandwidth", value, {"intra_node_gb_per_s", "inter_node_gb_per_s"}));
  for (const auto& [key, item] : value.items())
    LRMOE_RETURN_IF_ERROR(ReadNumber(
        "bandwidth." + key, item,
        key == "intra_node_gb_per_s" ? bandwidth.intra_node_gb_per_s : bandwidth.inter_node_gb_per_s));
  return absl::OkStatus();
}

absl::Status ReadPolicyField(const std::string& key, const Json& item, Policy& policy) {
  if (key == "window_us") return ReadNumber(key, item, policy.window_us);
  if (key == "retention_floor") return ReadNumber(key, item, policy.retention_floor);
  if (key == "balance_tolerance") return ReadNumber(key, item, policy.balance_tolerance);
  if (key == "on_infeasible") {
    if (item != "fail" && item != "best_effort") return BadField(key, item, "\"fail\", \"best_effort\"");
    policy.on_infeasible = item == "fail" ? OnInfeasible::kFail : OnInfeasible::kBestEffort;
    return absl::OkStatus();
  }
  LRMOE_RETURN_IF_ERROR(CheckList(key, item, 1000));
  policy.rates.clear();
  for (size_t i = 0; i < item.size(); ++i)
    LRMOE_RETURN_IF_ERROR(ReadNumber(absl::StrCat("rates[", i, "]"), item[i], policy.rates.emplace_back()));
  return absl::OkStatus();
}

absl::Status ReadField(const std::string& key, const Json& item, PlanningProblem& problem) {
  if (key == "format")
    return item == "lrmoe-planning-problem" ? absl::OkStatus()
                                            : BadField(key, item, "\"lrmoe-planning-problem\"");
  if (key == "version") return item == 1 ? absl::OkStatus() : BadField(key, item, "1");
  if (key == "counts") return ReadCounts(item, problem);
  if (key == "ranks") return ReadRanks(item, problem);
  if (key == "owner") return ReadExperts(key, item, problem.owner);
  if (key == "resident") return ReadResident(item, problem);
  if (key == "history") return ReadHistory(item, problem);
  if (key == "model") return ReadModel(item, problem.model);
  if (key == "bandwidth") return ReadBandwidth(item, problem.cluster.bandwidth);
  return ReadPolicyField(key, item, problem.policy);
}

}  // namespace

absl::StatusOr<PlanningProblem> ReadProblem(const std::string& text, const std::string& planner) {
  LRMOE_ASSIGN_OR_RETURN(const Json json, ParseJson(text));
  LRMOE_RETURN_IF_ERROR(
      CheckKeys("the problem", json,
                {"format", "version", "counts", "ranks", "owner", "resident", "history", "model", "bandwidth",
                 "window_us", "rates", "retention_floor", "balance_tolerance", "on_infeasible"}));
  LRMOE_RETURN_IF_ERROR(RequireKeys("the problem", json, {"counts", "owner", "ranks"}));
  PlanningProblem problem;
  problem.policy.planner = planner;
  for (const auto& [key, item] : json.items()) LRMOE_RETURN_IF_ERROR(ReadField(key, item, problem));
  LRMOE_RETURN_IF_ERROR(planner::Validate(problem));
  return problem;
}

}  // namespace lrmoe::sim
