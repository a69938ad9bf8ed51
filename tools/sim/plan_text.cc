#include "tools/sim/plan_text.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/sim/text_table.h"

namespace lrmoe::sim {

std::string PlanText(const LayerPlan& plan) {
  int64_t routed = 0, kept = 0;
  for (const RankPlan& rank : plan.ranks) routed += rank.forward_rows, kept += rank.backward_rows;
  std::string out = absl::StrFormat(
      "policy %s: %s, retention rate %g (%d of %d rows), imbalance %.3f before, %.3f forward, %.3f "
      "backward\n",
      plan.policy, plan.feasible ? "feasible" : "NOT feasible (best effort)", plan.retention_rate, kept,
      routed, plan.imbalance.before, plan.imbalance.forward, plan.imbalance.backward);
  const PredictedTime& time = plan.predicted_us;
  absl::StrAppendFormat(&out,
                        "predicted us: weights %.1f, dispatch %.1f, compute %.1f, return %.1f, gradients "
                        "%.1f; planned in %.1f us\n\n",
                        time.weights, time.dispatch, time.compute, time.return_, time.gradients,
                        plan.plan_us);
  TextTable ranks(
      {"rank", "forward rows", "backward rows", "experts", "replicas", "tokens", "staging", "total"});
  for (size_t g = 0; g < plan.ranks.size(); ++g) {
    const RankPlan& rank = plan.ranks[g];
    const MemoryBytes& bytes = rank.memory_bytes;
    const auto text = [](int64_t value) { return BytesText(static_cast<double>(value)); };
    ranks.Add({absl::StrCat(g), absl::StrCat(rank.forward_rows), absl::StrCat(rank.backward_rows),
               text(bytes.experts), text(bytes.replicas), text(bytes.tokens), text(bytes.staging),
               text(bytes.total())});
  }
  out += ranks.ToString();
  TextTable replicas({"replica of expert", "on rank", "forward rows", "backward rows", "weights"});
  int32_t count = 0;
  for (const InstancePlan& instance : plan.instances) {
    if (instance.owner) continue;
    ++count;
    replicas.Add({absl::StrCat(instance.expert_idx), absl::StrCat(instance.rank_idx),
                  absl::StrCat(instance.forward_rows), absl::StrCat(instance.backward_rows),
                  instance.is_new ? "transferred" : "resident"});
  }
  out += count > 0 ? "\n" + replicas.ToString() : "\nno replicas\n";
  if (plan.rejected.empty()) return out;
  TextTable rejected({"rejected rate", "constraint", "where", "needed", "available", "unit"});
  for (const RejectedCandidate& r : plan.rejected)
    rejected.Add({absl::StrFormat("%g", r.retention_rate), r.constraint, r.where,
                  absl::StrFormat("%.0f", r.needed), absl::StrFormat("%.0f", r.available), r.unit});
  return out + "\n" + rejected.ToString();
}

}  // namespace lrmoe::sim
