// status, workers, layers, policy.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "common/table.h"
#include "common/units.h"
#include "tools/lrmoectl/json.h"
#include "tools/lrmoectl/render.h"

namespace lrmoe::ctl {
namespace {

// "2 h 03 min", "45 s".
std::string Elapsed(double seconds) {
  if (!(seconds >= 60.0)) return absl::StrCat(Fixed(seconds, seconds < 10.0 ? 1 : 0), " s");
  if (seconds > 1e15) return absl::StrCat(seconds, " s");
  const int64_t minutes = static_cast<int64_t>(seconds) / 60;
  if (minutes < 60) return absl::StrCat(minutes, " min ", static_cast<int64_t>(seconds) % 60, " s");
  if (minutes < 48 * 60) return absl::StrCat(minutes / 60, " h ", minutes % 60, " min");
  return absl::StrCat(minutes / (24 * 60), " d ", minutes / 60 % 24, " h");
}

absl::string_view TypeName(v1::DataType type) {
  switch (type) {
    case v1::DATA_TYPE_BF16:
      return "bf16";
    case v1::DATA_TYPE_FP32:
      return "fp32";
    default:
      return "unknown type";
  }
}

absl::string_view ActivationName(v1::Activation activation) {
  switch (activation) {
    case v1::ACTIVATION_SILU:
      return "silu";
    case v1::ACTIVATION_GELU:
      return "gelu";
    default:
      return "unknown activation";
  }
}

Json ModelJson(const v1::ModelSpec& model) {
  return {{"num_layers", model.num_layers()},
          {"num_experts", model.num_experts()},
          {"top_k", model.top_k()},
          {"hidden_size", model.hidden_size()},
          {"intermediate_size", model.intermediate_size()},
          {"gated", model.gated()},
          {"activation", std::string(ActivationName(model.activation()))},
          {"dtype", std::string(TypeName(model.dtype()))}};
}

std::string ModelText(const v1::ModelSpec& model) {
  return absl::StrCat(model.num_layers(), " layers, ", model.num_experts(), " experts, top-", model.top_k(),
                      ", hidden ", model.hidden_size(), ", intermediate ", model.intermediate_size(),
                      model.gated() ? ", gated " : ", ", ActivationName(model.activation()), ", ",
                      TypeName(model.dtype()));
}

Json StateJson(const v1::StateDirectory& state) {
  return {
      {"path", state.path()}, {"waiting", state.waiting()}, {"lost", state.lost()}, {"error", state.error()}};
}

std::string StateText(const v1::StateDirectory& state) {
  std::string text = state.path();
  if (state.waiting() > 0)
    absl::StrAppend(&text, ", ", HumanCount(state.waiting()), " records to be written");
  if (state.lost() > 0) absl::StrAppend(&text, ", ", HumanCount(state.lost()), " records lost");
  if (!state.error().empty()) absl::StrAppend(&text, "; cannot be written: ", state.error());
  return text;
}

Json StatusJson(const v1::ControllerStatus& status, absl::string_view address) {
  return {
      {"controller", std::string(address)},
      {"version", status.version()},
      {"uptime_s", status.uptime_s()},
      {"epoch", status.epoch()},
      {"epoch_state", status.epoch_state()},
      {"epoch_reason", status.epoch_reason()},
      {"ranks_expected", status.ranks_expected()},
      {"ranks_connected", status.ranks_connected()},
      {"missing_ranks", std::vector<int32_t>(status.missing_ranks().begin(), status.missing_ranks().end())},
      {"model", status.has_model() ? ModelJson(status.model()) : Json(nullptr)},
      {"current_step", status.current_step()},
      {"plans_made", status.plans_made()},
      {"plans_infeasible", status.plans_infeasible()},
      {"plan_us", {{"p50", status.plan_us_p50()}, {"p99", status.plan_us_p99()}}},
      {"state_dir", status.has_state_dir() ? StateJson(status.state_dir()) : Json(nullptr)}};
}

// A policy value with its JSON type: number, list of numbers, else text ("inf" too, which JSON has no number
// for).
Json PolicyValueJson(const std::string& name, const std::string& value) {
  if (name == "rates") {
    Json list = Json::array();
    for (absl::string_view part : absl::StrSplit(value, ',', absl::SkipEmpty()))
      list.push_back(PolicyValueJson("", std::string(part)));
    return list;
  }
  uint64_t whole;
  double number;
  if (absl::SimpleAtoi(value, &whole)) return whole;
  if (absl::SimpleAtod(value, &number) && std::isfinite(number)) return number;
  return value;
}

Json PolicyJson(const v1::PolicySettings& policy) {
  Json json = Json::object();
  for (const v1::PolicySettings::Field& field : policy.fields())
    json[field.name()] = PolicyValueJson(field.name(), field.value());
  return json;
}

std::string PolicyTable(const v1::PolicySettings& policy, bool colour) {
  Table table({{"setting", Align::kLeft}, {"value", Align::kLeft}});
  for (const v1::PolicySettings::Field& field : policy.fields()) table.AddRow({field.name(), field.value()});
  return table.ToString(colour);
}

}  // namespace

std::string RenderStatus(const v1::ControllerStatus& status, absl::string_view address, View view) {
  if (view.json) return Dump(StatusJson(status, address));
  std::vector<std::pair<std::string, std::string>> lines = {
      {"controller",
       absl::StrCat(address, ", version ", status.version(), ", up ", Elapsed(status.uptime_s()))},
      {"epoch", status.epoch() == 0 ? "none yet" : absl::StrCat(status.epoch(), ", ", status.epoch_state())},
      {"ranks", absl::StrCat(status.ranks_connected(), " of ", status.ranks_expected(), " connected")}};
  if (!status.epoch_reason().empty()) lines.push_back({"reason", status.epoch_reason()});
  if (!status.missing_ranks().empty())
    lines.push_back({"waiting for", absl::StrCat("rank ", absl::StrJoin(status.missing_ranks(), ", rank "))});
  lines.push_back({"model", status.has_model() ? ModelText(status.model()) : "none attached yet"});
  lines.push_back({"step", HumanCount(status.current_step())});
  lines.push_back({"plans", absl::StrCat(HumanCount(status.plans_made()), " made, ",
                                         HumanCount(status.plans_infeasible()), " infeasible")});
  if (status.plans_made() > 0)
    lines.push_back({"planning time", absl::StrCat("p50 ", HumanMicros(status.plan_us_p50()), ", p99 ",
                                                   HumanMicros(status.plan_us_p99()))});
  if (status.has_state_dir()) lines.push_back({"state", StateText(status.state_dir())});
  return NameValueLines(lines);
}

std::string RenderWorkers(const v1::ListWorkersResponse& workers, View view) {
  if (view.json) {
    Json list = Json::array();
    for (const v1::WorkerStatus& worker : workers.workers())
      list.push_back({{"rank", worker.rank()},
                      {"node", worker.node()},
                      {"device", worker.device()},
                      {"state", worker.state()},
                      {"memory_budget_bytes", worker.memory_budget_bytes()},
                      {"replica_slots", worker.replica_slots()},
                      {"rows_per_ms", worker.rows_per_ms()},
                      {"current_step", worker.current_step()},
                      {"last_seen_s", worker.last_seen_s()},
                      {"peak_bytes", worker.peak_bytes()},
                      {"version", worker.version()}});
    return Dump({{"workers", list}});
  }
  Table table({{"rank"},
               {"node", Align::kLeft},
               {"device", Align::kLeft},
               {"state", Align::kLeft},
               {"memory budget"},
               {"peak memory"},
               {"replica slots"},
               {"rows/ms"},
               {"step"},
               {"last seen"},
               {"version", Align::kLeft}});
  for (const v1::WorkerStatus& worker : workers.workers()) {
    std::vector<std::string> cells = {absl::StrCat(worker.rank()),
                                      worker.node(),
                                      worker.device(),
                                      worker.state(),
                                      HumanBytes(static_cast<double>(worker.memory_budget_bytes())),
                                      HumanBytes(static_cast<double>(worker.peak_bytes())),
                                      absl::StrCat(worker.replica_slots()),
                                      HumanCount(static_cast<int64_t>(std::min(worker.rows_per_ms(), 1e15))),
                                      HumanCount(worker.current_step()),
                                      absl::StrCat(Elapsed(worker.last_seen_s()), " ago"),
                                      worker.version()};
    if (worker.state() == "connected") {
      table.AddRow(std::move(cells));
    } else {
      table.AddRow(std::move(cells), Style::kRed);
    }
  }
  return table.ToString(view.colour);
}

std::string RenderLayers(const v1::ListLayersResponse& layers, View view) {
  if (view.json) {
    Json list = Json::array();
    for (const v1::LayerStatus& layer : layers.layers())
      list.push_back({{"layer", layer.layer()},
                      {"last_step", layer.last_step()},
                      {"retention_rate", layer.retention_rate()},
                      {"retention_rate_mean", layer.retention_rate_mean()},
                      {"imbalance",
                       {{"before", layer.imbalance().before()},
                        {"forward", layer.imbalance().forward()},
                        {"backward", layer.imbalance().backward()}}},
                      {"replicas", layer.replicas()},
                      {"new_replicas", layer.new_replicas()},
                      {"routed_rows", layer.routed_rows()},
                      {"kept_rows", layer.kept_rows()}});
    return Dump({{"layers", list}});
  }
  Table table({{"layer"},
               {"last step"},
               {"routed rows"},
               {"kept rows"},
               {"retention"},
               {"mean retention"},
               {"imbalance before"},
               {"forward"},
               {"backward"},
               {"replicas"},
               {"new"}});
  for (const v1::LayerStatus& layer : layers.layers())
    table.AddRow({absl::StrCat(layer.layer()), HumanCount(layer.last_step()), HumanCount(layer.routed_rows()),
                  HumanCount(layer.kept_rows()), HumanPercent(layer.retention_rate()),
                  HumanPercent(layer.retention_rate_mean()), Fixed(layer.imbalance().before(), 2),
                  Fixed(layer.imbalance().forward(), 2), Fixed(layer.imbalance().backward(), 2),
                  absl::StrCat(layer.replicas()), absl::StrCat(layer.new_replicas())});
  return table.ToString(view.colour);
}

std::string RenderPolicy(const v1::PolicySettings& policy, View view) {
  return view.json ? Dump(PolicyJson(policy)) : PolicyTable(policy, view.colour);
}

std::string RenderPolicyChange(const v1::SetPolicyResponse& change, View view) {
  if (view.json) return Dump({{"from_step", change.from_step()}, {"policy", PolicyJson(change.policy())}});
  return absl::StrCat("Takes effect from step ", HumanCount(change.from_step()), " on all ranks.\n\n",
                      PolicyTable(change.policy(), view.colour));
}

}  // namespace lrmoe::ctl
