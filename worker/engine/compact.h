// The part of the backward pass that works on kept rows only, after routing (design "Compact and exchange",
// "Four grouped GEMMs", "Return"). The methods run in the order they are declared, each once.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "absl/status/status.h"
#include "worker/engine/engine_state.h"
#include "worker/engine/payload.h"
#include "worker/engine/route_backward.h"
#include "worker/engine/select.h"

namespace lrmoe::engine {

struct BackwardRoute {
  SelectedPairs selected;
  KeptCounts kept;
  std::vector<Move> moves;
  SourceSegments source;
  ExecutorSegments executor;
  Buffer sent_pair;  // int32 [P], device: the pairs of this source that run, in send order; then unspecified
};

class CompactPass {
 public:
  // All outlive the pass. `route` is filled before DescribeRows.
  CompactPass(EngineState& state, Exchange& exchange, ForwardContext& context, BackwardRoute& route)
      : state_(state), exchange_(exchange), context_(context), route_(route) {}

  // Sources tell forward executors which rows survived (a bit per row) and backward executors alpha and the
  // payload row of each kept pair. Sizes follow from the kept counts. Uses up the context's weights and the
  // route's marks.
  absl::Status DescribeRows();
  // Executors bring the saved rows of their kept pairs together; overflow travels to its new executor.
  absl::Status CompactSaved();
  // Sources gather the kept gradient rows, once per (token, destination). dy: where the device reads it.
  absl::Status PackGradients(const std::byte* dy);
  absl::Status StartDispatch();
  // FC1 rows that were not saved, again from x. Needs no gradient rows: they are under way.
  absl::Status Recompute();
  absl::Status FinishDispatch();
  // Three of the four grouped GEMMs: all that dx needs, and W2's gradient. Weight gradients accumulate in the
  // store.
  absl::Status Compute();
  // d(alpha) of kept pairs back to their sources: dalpha [P], 0 for dropped ones. There once the device was
  // waited for.
  absl::Status ReturnScalars(std::span<float> dalpha);
  // dx: summed per (token, executor) at the executor, then over executors in rank order at the source.
  absl::Status StartReturn();
  // The fourth, W1's gradient: nobody waits for it, so it runs while dx is under way.
  absl::Status ComputeLast();
  absl::Status FinishReturn(std::span<std::byte> dx);

 private:
  // Where the compact rows of each local instance begin, and how many there are.
  struct LocalRows {
    int32_t expert_idx;
    int64_t first_row, rows;
  };
  struct MovedRows {  // a stretch on its way between two executors
    int64_t row;      // sender: first entry in kept_rows_; receiver: first compact row
    int64_t count;
  };
  struct Transfers {
    StagedTransfer sizes;                         // but unit_bytes
    std::vector<std::vector<MovedRows>> out, in;  // [G]
  };
  // A description from one rank to another: masks, payload rows (int32), weights (float). All in bytes.
  struct Description {
    std::vector<int64_t> begin, rows, weights, bytes;  // [G] where each rank's parts begin; sizes
    int64_t total = 0;
  };
  Description Describe(bool as_source) const;
  absl::Status WriteDescriptions(const Description& layout, const Buffer& pair_row, const Buffer& out) const;
  absl::Status ReadMasks(const Description& layout, const Buffer& in);
  absl::Status ReadRows(const Description& layout, const Buffer& in);
  bool AllStay() const;
  Transfers FindTransfers() const;
  absl::Status MoveRows();
  absl::Status Gemm(kernels::GemmKind kind, int64_t n, int64_t k, const std::byte* a, const std::byte* b,
                    int64_t weight_offset);
  std::vector<LocalRows> Locals() const;

  EngineState& state_;
  Exchange& exchange_;
  ForwardContext& context_;
  BackwardRoute& route_;

  // Source.
  Payload payload_;
  Buffer payload_out_;  // [payload rows, H]
  // Executor. What there is one of per row lies in the device's memory.
  Buffer kept_rows_;                    // int32: forward rows that survived, by (instance, source, pair)
  std::vector<int64_t> run_kept_base_;  // where each run of context_.route.runs begins in kept_rows_
  Buffer row_alpha_;                    // float, compact row order
  Buffer row_payload_;                  // int32, compact row order: row of payload_in_
  std::vector<int64_t> payload_rows_;   // [G] received from each source
  Buffer x_, a_;            // [K, H], [K, fc1_width]: compact rows (the saved buffers when all stay)
  Buffer payload_in_;       // [payload rows, H]
  Buffer gradient_;         // [K, H]: g, later dx
  Buffer da_;               // [K, fc1_width]: gradients of FC1 rows
  Buffer row_dalpha_;       // float, compact row order
  Buffer returned_;         // source: [payload rows, H]
  RowsUnderWay under_way_;  // gradient rows, later dx; behind the buffers it uses
};

}  // namespace lrmoe::engine
