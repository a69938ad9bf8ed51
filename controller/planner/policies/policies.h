// The policies: one file each. Every one decides a placement with forward rows for each candidate of
// Algorithm 1.
#pragma once

#include <span>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/plan.h"
#include "controller/planner/problem.h"
#include "controller/planner/workload.h"

namespace lrmoe::planner {

// The paper's method: max-min fair quotas, replicas within the balance tolerance, exact allocation.
absl::StatusOr<LayerPlan> PlanLrmoe(const PlanningProblem& problem, const Workload& work);

// Fixed ownership (Megatron-LM): no replicas, every row at its expert's owner. With rates = {1.0} exactly
// that; with more rates Algorithm 1 lowers retention, uniformly or as memory dictates, where full backward
// does not fit.
absl::StatusOr<LayerPlan> PlanFixed(const PlanningProblem& problem, const Workload& work);

// What a user should know of a policy before comparing with it.
struct PolicyInfo {
  absl::string_view name;
  absl::string_view source;   // where its steps come from
  absl::string_view decides;  // what it chooses, and from what
  absl::string_view assumes;  // what it takes for granted
  absl::string_view differs;  // where this implementation departs from the source; empty: nowhere
  bool live = false;          // a controller can run it
  absl::StatusOr<LayerPlan> (*plan)(const PlanningProblem& problem, const Workload& work) = nullptr;
  // Plans from problem.history; without any it says in `assumes` where it starts.
  bool uses_history = false;
  // Lays out every instance anew: an expert's owner need not hold an instance of it. A rank holds at most as
  // many experts as it owns and has replica_slots. What it held before but does not own arrives as residents.
  // Any other (expert, rank) but the owner's is a new transfer: weights come from the owner, where the
  // optimizer state stays and gradients are summed.
  bool moves_owners = false;
  // A bound, not a policy: replicas need no slot, no memory and no transfer.
  bool ideal = false;
};

// The comparison policies, each in the file of its name. None is live: they plan recorded or synthetic
// routing.
extern const PolicyInfo kUltraepPolicy, kMoonepPolicy, kEchoPolicy, kLlepPolicy, kEplbPolicy, kSymiPolicy,
    kLaerPolicy, kFastermoePolicy, kSmartmoePolicy, kFlexmoePolicy, kTopoepPolicy, kProportionalPolicy,
    kWaterfillPolicy, kIdealPolicy;

// All of them, in the order tables show them.
std::span<const PolicyInfo> AllPolicies();
// nullptr when there is none of that name.
const PolicyInfo* FindPolicy(absl::string_view name);

}  // namespace lrmoe::planner
