// What an open forward keeps until its backward: at the executor the rows, at the source the pairs. Paper,
// section 3; every byte of a Buffer here is in the memory model (common/memory_model.h).
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "common/ids.h"
#include "common/plan.h"
#include "worker/engine/buffers.h"
#include "worker/engine/plan_provider.h"
#include "worker/engine/routing.h"

namespace lrmoe::engine {

struct ForwardContext {
  ExecutionPlan execution;
  ParameterVersion version{};  // the weights that made y; the backward must find the same
  int64_t num_tokens = 0;
  int64_t token_offset = 0;  // tokens of all lower ranks: numbers tokens globally, for Selection::kRandom
  ForwardRoute route;

  // Source, one per pair, in the device's memory.
  Buffer pair_position;  // int32: place in send order, also the row in y_rows
  Buffer alpha;          // float
  Buffer norm2;          // float: ||phi||^2, in send order
  Buffer y_rows;         // [P, H] compute type, in send order; only when router_gradient is exact

  // Executor, one per row, in row order.
  Buffer x;  // [R, H] compute type
  Buffer a;  // [R, fc1_width] compute type; empty under recompute (then made again from x)

  InvocationReport report;  // the forward's part
  int64_t tensor_peak_bytes = 0;

  const LayerPlan& plan() const { return execution.plan; }
  // Bytes in the arena.
  int64_t bytes() const {
    return pair_position.size() + alpha.size() + norm2.size() + y_rows.size() + x.size() + a.size();
  }
};

// The open forwards of one engine; equal keys on all ranks, because operations are collective.
class ContextTable {
 public:
  explicit ContextTable(int32_t limit) : limit_(limit) {}

  ForwardContext* Find(const Invocation& invocation);
  void Insert(const Invocation& invocation, ForwardContext context) {
    contexts_.insert_or_assign(invocation, std::move(context));
  }
  // Takes a context out. It must exist.
  ForwardContext Take(const Invocation& invocation);
  // Drops contexts of earlier steps of this layer and that of the invocation itself (recomputation).
  void DropBefore(const Invocation& invocation);
  void Clear() { contexts_.clear(); }

  // ResourceExhausted, naming the oldest open forwards, when one more (of `invocation`) would pass the limit.
  absl::Status CheckRoom(const Invocation& invocation) const;
  int64_t size() const { return static_cast<int64_t>(contexts_.size()); }
  std::vector<const LayerPlan*> PlansOf(int32_t layer) const;

 private:
  int32_t limit_;
  std::map<Invocation, ForwardContext> contexts_;
};

}  // namespace lrmoe::engine
