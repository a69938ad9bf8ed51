#include "worker/engine/context.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/check.h"

namespace lrmoe::engine {

ForwardContext* ContextTable::Find(const Invocation& invocation) {
  auto it = contexts_.find(invocation);
  return it == contexts_.end() ? nullptr : &it->second;
}

ForwardContext ContextTable::Take(const Invocation& invocation) {
  auto node = contexts_.extract(invocation);
  LRMOE_CHECK(!node.empty());
  return std::move(node.mapped());
}

void ContextTable::DropBefore(const Invocation& invocation) {
  std::erase_if(contexts_, [&](const auto& entry) {
    return entry.first == invocation ||
           (entry.first.layer == invocation.layer && entry.first.step < invocation.step);
  });
}

absl::Status ContextTable::CheckRoom(const Invocation& invocation) const {
  int64_t staying = 0;
  const Invocation* oldest = nullptr;
  for (const auto& [open, context] : contexts_) {
    if (open == invocation || (open.layer == invocation.layer && open.step < invocation.step)) continue;
    ++staying;
    if (oldest == nullptr) oldest = &open;  // the map is ordered by step
  }
  if (staying < limit_) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat(
      staying, " forwards are open and wait for their backward, the most allowed (max_open_contexts ", limit_,
      "); the oldest is ", ToString(*oldest), ": call backward or discard for forwards that are not used"));
}

std::vector<const LayerPlan*> ContextTable::PlansOf(int32_t layer) const {
  std::vector<const LayerPlan*> plans;
  for (const auto& [open, context] : contexts_)
    if (open.layer == layer) plans.push_back(&context.plan());
  return plans;
}

}  // namespace lrmoe::engine
