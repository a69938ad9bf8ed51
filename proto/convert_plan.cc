// Plans: the one large message, and the one a rank must be able to trust.
#include <string>
#include <utility>
#include <vector>

#include "common/status_macros.h"
#include "proto/convert.h"
#include "proto/range.h"

namespace lrmoe {
namespace {

using wire::InRange;
using wire::Measured;

constexpr int64_t kMaxRows = int64_t{1} << 50;
constexpr int32_t kMaxRejected = 1000;  // as many as there may be candidate rates

void MemoryToWire(const MemoryBytes& memory, v1::MemoryBytes* wire) {
  wire->set_experts(memory.experts);
  wire->set_replicas(memory.replicas);
  wire->set_tokens(memory.tokens);
  wire->set_staging(memory.staging);
}

void InstanceToWire(const InstancePlan& instance, v1::InstancePlan* wire) {
  wire->set_expert(instance.expert_idx);
  wire->set_rank(instance.rank_idx);
  wire->set_owner(instance.owner);
  wire->set_is_new(instance.is_new);
  wire->set_forward_rows(instance.forward_rows);
  wire->set_backward_rows(instance.backward_rows);
  wire->mutable_forward_rows_by_source()->Add(instance.forward_rows_by_source.begin(),
                                              instance.forward_rows_by_source.end());
}

absl::StatusOr<InstancePlan> InstanceFromWire(const v1::InstancePlan& wire, int32_t num_experts,
                                              int32_t num_ranks) {
  LRMOE_RETURN_IF_ERROR(InRange("expert", wire.expert(), 0, num_experts - 1));
  LRMOE_RETURN_IF_ERROR(InRange("rank", wire.rank(), 0, num_ranks - 1));
  LRMOE_RETURN_IF_ERROR(InRange("forward_rows", wire.forward_rows(), 0, kMaxRows));
  LRMOE_RETURN_IF_ERROR(InRange("backward_rows", wire.backward_rows(), 0, kMaxRows));
  LRMOE_RETURN_IF_ERROR(
      InRange("number of forward_rows_by_source", wire.forward_rows_by_source_size(), num_ranks, num_ranks));
  if (wire.owner() && wire.is_new()) return wire::Bad("is_new", "true of an owner's instance", "false");
  InstancePlan instance{wire.expert(),        wire.rank(), wire.owner(), wire.is_new(), wire.forward_rows(),
                        wire.backward_rows(), {}};
  const int64_t* rows = wire.forward_rows_by_source().data();
  instance.forward_rows_by_source.assign(rows, rows + num_ranks);
  int64_t sum = 0;
  for (int32_t source = 0; source < num_ranks; ++source) {
    LRMOE_RETURN_IF_ERROR(InRange("forward_rows_by_source", source, rows[source], 0, kMaxCount));
    sum += rows[source];
  }
  if (sum != wire.forward_rows())
    return wire::Bad("forward_rows", absl::StrCat(wire.forward_rows()),
                     absl::StrCat(sum, ", the sum over its sources"));
  return instance;
}

// Order (expert, owner first, rank), one owner each (unless `owners_move`), and the sums that instances must
// agree with.
absl::Status CheckSums(const LayerPlan& plan, bool owners_move) {
  std::vector<int64_t> forward(plan.ranks.size(), 0), backward(plan.ranks.size(), 0);
  size_t next = 0;
  for (size_t expert = 0; expert < plan.quota.size(); ++expert) {
    int64_t routed = 0, kept = 0;
    bool first = true;
    int32_t previous_replica = -1, owner = -1;
    for (; next < plan.instances.size() && plan.instances[next].expert_idx == static_cast<int32_t>(expert);
         ++next) {
      const InstancePlan& instance = plan.instances[next];
      // Names are put together for an error only: this is on the way from counts to plan.
      const auto where = [next] { return absl::StrCat("plan.instances[", next, "]"); };
      if (instance.owner != first && (instance.owner || !owners_move))
        return wire::Bad(absl::StrCat(where(), ".owner"), instance.owner ? "true" : "false",
                         "true for exactly the first instance of an expert");
      if (instance.owner) owner = instance.rank_idx;
      if (!instance.owner && (instance.rank_idx <= previous_replica || instance.rank_idx == owner))
        return wire::Bad(absl::StrCat(where(), ".rank"), absl::StrCat(instance.rank_idx),
                         "replicas of an expert by ascending rank, at most one instance per rank");
      if (!instance.owner) previous_replica = instance.rank_idx;
      first = false;
      routed += instance.forward_rows;
      kept += instance.backward_rows;
      forward[instance.rank_idx] += instance.forward_rows;
      backward[instance.rank_idx] += instance.backward_rows;
    }
    if (first)
      return wire::Bad(absl::StrCat("number of instances of expert ", expert), "0", "its owner's at least");
    LRMOE_RETURN_IF_ERROR(InRange("plan.quota", static_cast<int64_t>(expert), plan.quota[expert], 0, routed));
    if (kept != plan.quota[expert])
      return wire::Bad(absl::StrCat("plan.quota[", expert, "]"), absl::StrCat(plan.quota[expert]),
                       absl::StrCat(kept, ", the backward rows of its instances"));
  }
  if (next != plan.instances.size())
    return wire::Bad(absl::StrCat("plan.instances[", next, "].expert"),
                     absl::StrCat(plan.instances[next].expert_idx),
                     "instances in the order of their experts");
  for (size_t rank = 0; rank < plan.ranks.size(); ++rank) {
    const RankPlan& sums = plan.ranks[rank];
    if (sums.forward_rows == forward[rank] && sums.backward_rows == backward[rank]) continue;
    LRMOE_RETURN_IF_ERROR(InRange(absl::StrCat("plan.ranks[", rank, "].forward_rows"), sums.forward_rows,
                                  forward[rank], forward[rank]));
    return InRange(absl::StrCat("plan.ranks[", rank, "].backward_rows"), sums.backward_rows, backward[rank],
                   backward[rank]);
  }
  return absl::OkStatus();
}

absl::Status RanksFromWire(const v1::LayerPlan& wire, LayerPlan& plan) {
  for (int rank = 0; rank < wire.ranks_size(); ++rank) {
    const v1::RankPlan& from = wire.ranks(rank);
    const v1::MemoryBytes& bytes = from.memory_bytes();
    for (int64_t value : {bytes.experts(), bytes.replicas(), bytes.tokens(), bytes.staging()})
      LRMOE_RETURN_IF_ERROR(InRange("plan.ranks.memory_bytes", rank, value, 0, INT64_MAX));
    plan.ranks.push_back({from.forward_rows(),
                          from.backward_rows(),
                          {bytes.experts(), bytes.replicas(), bytes.tokens(), bytes.staging()}});
  }
  return absl::OkStatus();
}

absl::Status ReasonsFromWire(const v1::LayerPlan& wire, LayerPlan& plan) {
  plan.imbalance = {wire.imbalance().before(), wire.imbalance().forward(), wire.imbalance().backward()};
  const v1::PredictedTime& time = wire.predicted_us();
  plan.predicted_us = {time.weights(), time.dispatch(), time.compute(), time.return_(), time.gradients()};
  plan.plan_us = wire.plan_us();
  for (double value : {plan.imbalance.before, plan.imbalance.forward, plan.imbalance.backward})
    LRMOE_RETURN_IF_ERROR(Measured("plan.imbalance", value));
  for (double value : {time.weights(), time.dispatch(), time.compute(), time.return_(), time.gradients()})
    LRMOE_RETURN_IF_ERROR(Measured("plan.predicted_us", value));
  LRMOE_RETURN_IF_ERROR(Measured("plan.plan_us", wire.plan_us()));
  LRMOE_RETURN_IF_ERROR(InRange("number of plan.rejected", wire.rejected_size(), 0, kMaxRejected));
  for (const v1::RejectedCandidate& from : wire.rejected()) {
    for (const std::string* text : {&from.constraint(), &from.where(), &from.unit()})
      LRMOE_RETURN_IF_ERROR(wire::Text("plan.rejected text", *text, 0, 256));
    plan.rejected.push_back({from.retention_rate(), from.constraint(), from.where(), from.needed(),
                             from.available(), from.unit()});
  }
  return absl::OkStatus();
}

absl::StatusOr<LayerPlan> PlanFromWire(const v1::LayerPlan& wire, bool owners_move) {
  LayerPlan plan;
  LRMOE_ASSIGN_OR_RETURN(plan.invocation, FromWire(wire.invocation()));
  LRMOE_RETURN_IF_ERROR(wire::Text("plan.policy", wire.policy(), 1, 64));
  plan.policy = wire.policy();
  plan.feasible = wire.feasible();
  if (!(wire.retention_rate() >= 0.0 && wire.retention_rate() <= 1.0))
    return wire::Bad("plan.retention_rate", absl::StrCat(wire.retention_rate()), "0..1");
  plan.retention_rate = wire.retention_rate();
  LRMOE_RETURN_IF_ERROR(InRange("number of plan.quota", wire.quota_size(), 1, kMaxExperts));
  LRMOE_RETURN_IF_ERROR(InRange("number of plan.ranks", wire.ranks_size(), 1, kMaxRanks));
  plan.quota.assign(wire.quota().begin(), wire.quota().end());
  LRMOE_RETURN_IF_ERROR(RanksFromWire(wire, plan));
  plan.instances.reserve(wire.instances_size());
  int32_t new_replicas = 0;
  for (int i = 0; i < wire.instances_size(); ++i) {
    absl::StatusOr<InstancePlan> instance =
        InstanceFromWire(wire.instances(i), wire.quota_size(), wire.ranks_size());
    if (!instance.ok()) return wire::Within(absl::StrCat("plan.instances[", i, "]"), instance.status());
    new_replicas += instance->is_new ? 1 : 0;
    plan.instances.push_back(*std::move(instance));
  }
  LRMOE_RETURN_IF_ERROR(CheckSums(plan, owners_move));
  LRMOE_RETURN_IF_ERROR(InRange("plan.new_replicas", wire.new_replicas(), new_replicas, new_replicas));
  plan.new_replicas = wire.new_replicas();
  LRMOE_RETURN_IF_ERROR(ReasonsFromWire(wire, plan));
  return plan;
}

}  // namespace

void ToWire(const LayerPlan& plan, v1::LayerPlan* wire) {
  ToWire(plan.invocation, wire->mutable_invocation());
  wire->set_policy(plan.policy);
  wire->set_feasible(plan.feasible);
  wire->set_retention_rate(plan.retention_rate);
  wire->mutable_quota()->Add(plan.quota.begin(), plan.quota.end());
  wire->mutable_instances()->Reserve(static_cast<int>(plan.instances.size()));
  for (const InstancePlan& instance : plan.instances) InstanceToWire(instance, wire->add_instances());
  for (const RankPlan& rank : plan.ranks) {
    v1::RankPlan* to = wire->add_ranks();
    to->set_forward_rows(rank.forward_rows);
    to->set_backward_rows(rank.backward_rows);
    MemoryToWire(rank.memory_bytes, to->mutable_memory_bytes());
  }
  wire->mutable_imbalance()->set_before(plan.imbalance.before);
  wire->mutable_imbalance()->set_forward(plan.imbalance.forward);
  wire->mutable_imbalance()->set_backward(plan.imbalance.backward);
  wire->set_new_replicas(plan.new_replicas);
  v1::PredictedTime* time = wire->mutable_predicted_us();
  time->set_weights(plan.predicted_us.weights);
  time->set_dispatch(plan.predicted_us.dispatch);
  time->set_compute(plan.predicted_us.compute);
  time->set_return_(plan.predicted_us.return_);
  time->set_gradients(plan.predicted_us.gradients);
  for (const RejectedCandidate& candidate : plan.rejected) {
    v1::RejectedCandidate* to = wire->add_rejected();
    to->set_retention_rate(candidate.retention_rate);
    to->set_constraint(candidate.constraint);
    to->set_where(candidate.where);
    to->set_needed(candidate.needed);
    to->set_available(candidate.available);
    to->set_unit(candidate.unit);
  }
  wire->set_plan_us(plan.plan_us);
}

absl::StatusOr<LayerPlan> FromWire(const v1::LayerPlan& wire) {
  return PlanFromWire(wire, false);
}

absl::StatusOr<LayerPlan> SimulatedFromWire(const v1::LayerPlan& wire) {
  return PlanFromWire(wire, true);
}

void ToWire(const ExecutionPlan& plan, v1::ExecutionPlan* wire) {
  ToWire(plan.plan, wire->mutable_plan());
  wire->set_selection(static_cast<v1::Selection>(plan.selection));
  wire->set_router_gradient(static_cast<v1::RouterGradient>(plan.router_gradient));
  wire->set_seed(plan.seed);
  wire->set_rescale(static_cast<v1::Rescale>(plan.rescale));
}

absl::StatusOr<ExecutionPlan> FromWire(const v1::ExecutionPlan& wire) {
  static_assert(v1::SELECTION_LRM == static_cast<int>(Selection::kLrm) &&
                v1::SELECTION_LRM_SAMPLED == static_cast<int>(Selection::kLrmSampled) &&
                v1::ROUTER_GRADIENT_EXACT == static_cast<int>(RouterGradient::kExact) &&
                v1::ROUTER_GRADIENT_RETAINED == static_cast<int>(RouterGradient::kRetained) &&
                v1::RESCALE_OFF == static_cast<int>(Rescale::kOff) &&
                v1::RESCALE_ROWS == static_cast<int>(Rescale::kRows));
  ExecutionPlan plan;
  LRMOE_RETURN_IF_ERROR(InRange("selection", wire.selection(), v1::SELECTION_LRM, v1::SELECTION_LRM_SAMPLED));
  LRMOE_RETURN_IF_ERROR(InRange("router_gradient", wire.router_gradient(), v1::ROUTER_GRADIENT_EXACT,
                                v1::ROUTER_GRADIENT_RETAINED));
  LRMOE_RETURN_IF_ERROR(InRange("rescale", wire.rescale(), v1::RESCALE_OFF, v1::RESCALE_ROWS));
  if (wire.selection() == v1::SELECTION_LRM_SAMPLED && wire.rescale() != v1::RESCALE_OFF)
    return wire::Bad("rescale", v1::Rescale_Name(wire.rescale()), "RESCALE_OFF with SELECTION_LRM_SAMPLED");
  LRMOE_ASSIGN_OR_RETURN(plan.plan, FromWire(wire.plan()));
  plan.selection = static_cast<Selection>(wire.selection());
  plan.router_gradient = static_cast<RouterGradient>(wire.router_gradient());
  plan.seed = wire.seed();
  plan.rescale = static_cast<Rescale>(wire.rescale());
  return plan;
}

}  // namespace lrmoe
