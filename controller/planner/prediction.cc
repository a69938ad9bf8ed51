#include "controller/planner/prediction.h"

#include <algorithm>

namespace lrmoe::planner {
namespace {

// Worst-case rows that each rank sends to and gets from other instances.
struct Moves {
  std::vector<int64_t> sent, received;
};

Moves WorstMoves(const Workload& work, const Candidate& candidate) {
  const PlacedRows& placed = *candidate.placed;
  Moves moves{std::vector<int64_t>(work.num_ranks, 0), std::vector<int64_t>(work.num_ranks, 0)};
  for (int32_t e = 0; e < work.num_experts; ++e) {
    const int32_t begin = placed.first[e], end = placed.first[e + 1];
    if (end - begin == 1) continue;
    int64_t routed = 0;
    for (int32_t i = begin; i < end; ++i) routed += placed.forward[i];
    for (int32_t i = begin; i < end; ++i) {
      const int64_t most_kept = std::min(placed.forward[i], candidate.quota[e]);
      const int64_t least_kept = std::max<int64_t>(0, candidate.quota[e] - (routed - placed.forward[i]));
      moves.sent[placed.rank[i]] += std::max<int64_t>(0, most_kept - candidate.backward[i]);
      moves.received[placed.rank[i]] += std::max<int64_t>(0, candidate.backward[i] - least_kept);
    }
  }
  return moves;
}

// Bytes a rank sends and receives, by kind of link.
struct Traffic {
  double out_on = 0, out_off = 0, in_on = 0, in_off = 0;
  double Us(const Bandwidth& bandwidth) const {
    const double on = bandwidth.intra_node_gb_per_s * 1e3, off = bandwidth.inter_node_gb_per_s * 1e3;
    return std::max(out_on / on + out_off / off, in_on / on + in_off / off);
  }
};

double Slowest(const std::vector<Traffic>& traffic, const Bandwidth& bandwidth) {
  double out = 0;
  for (const Traffic& t : traffic) out = std::max(out, t.Us(bandwidth));
  return out;
}

}  // namespace

std::vector<RankPlan> PredictRanks(const PlanningProblem& problem, const Workload& work,
                                   const Candidate& candidate) {
  const PlacedRows& placed = *candidate.placed;
  std::vector<RankPlan> out(work.num_ranks);
  for (int32_t i = 0; i < placed.size(); ++i) {
    out[placed.rank[i]].forward_rows += placed.forward[i];
    out[placed.rank[i]].backward_rows += candidate.backward[i];
  }
  const Moves moves = WorstMoves(work, candidate);
  std::vector<int64_t> exported(work.num_ranks, 0);
  for (int32_t i = 0; i < placed.size() && !placed.free_replicas; ++i) {
    const int32_t owner = problem.owner[placed.expert[i]];
    exported[owner] += placed.rank[i] != owner;
  }
  std::vector<int64_t> scored(work.num_ranks, 0), most_scored(work.num_ranks, 0);
  for (int32_t e = 0; e < work.num_experts; ++e) {
    if (candidate.quota[e] == 0 || candidate.quota[e] == work.rows[e]) continue;
    scored[problem.owner[e]] += work.rows[e];
    most_scored[problem.owner[e]] = std::max(most_scored[problem.owner[e]], work.rows[e]);
  }
  for (int32_t g = 0; g < work.num_ranks; ++g) {
    RankWork rank;
    rank.scored_pairs = scored[g];
    rank.most_scored_pairs = most_scored[g];
    rank.exported_replicas = exported[g];
    rank.owned_experts = work.num_owned[g];
    rank.replicas = placed.replicas[g];
    rank.source_pairs = work.source_pairs[g];
    rank.forward_rows = out[g].forward_rows;
    rank.kept_rows = out[g].backward_rows;
    rank.moved_rows = moves.sent[g];
    rank.received_rows = moves.received[g];
    out[g].memory_bytes = PredictMemory(work.memory, rank);
  }
  return out;
}

PredictedTime PredictTime(const PlanningProblem& problem, const Workload& work, const Candidate& candidate) {
  const PlacedRows& placed = *candidate.placed;
  const auto& ranks = problem.cluster.ranks;
  const Bandwidth& bandwidth = problem.cluster.bandwidth;
  const MemoryModelOptions& model = problem.model;
  const double parameters =
      (double(model.gated ? 2 : 1) + 1) * model.intermediate_size * static_cast<double>(model.hidden_size);
  std::vector<Traffic> weights(work.num_ranks), gradients(work.num_ranks), rows(work.num_ranks);
  std::vector<double> forward(work.num_ranks, 0), backward(work.num_ranks, 0);
  for (int32_t e = 0; e < work.num_experts; ++e) {
    const int32_t owner = problem.owner[e];
    for (int32_t i = placed.first[e]; i < placed.first[e + 1]; ++i) {
      const int32_t rank = placed.rank[i];
      forward[rank] += static_cast<double>(placed.forward[i]);
      backward[rank] += static_cast<double>(candidate.backward[i]);
      if (rank == owner || placed.free_replicas) continue;
      const bool on_node = ranks[rank].node == ranks[owner].node;
      const double weight_bytes = placed.is_new[i] ? parameters * static_cast<double>(model.weight_bytes) : 0;
      const double gradient_bytes =
          candidate.backward[i] > 0 ? parameters * static_cast<double>(model.gradient_bytes) : 0;
      (on_node ? weights[owner].out_on : weights[owner].out_off) += weight_bytes;
      (on_node ? weights[rank].in_on : weights[rank].in_off) += weight_bytes;
      (on_node ? gradients[rank].out_on : gradients[rank].out_off) += gradient_bytes;
      (on_node ? gradients[owner].in_on : gradients[owner].in_off) += gradient_bytes;
    }
  }
  const double rate =
      work.total > 0 ? static_cast<double>(candidate.kept) / static_cast<double>(work.total) : 0;
  const double row_bytes = static_cast<double>(model.hidden_size) * static_cast<double>(model.weight_bytes);
  const LinkRows& links = candidate.split->links;
  const Moves moves = WorstMoves(work, candidate);
  PredictedTime out;
  double moves_us = 0;
  for (int32_t g = 0; g < work.num_ranks; ++g) {
    // Forward sends every pair; backward what is kept: in the mean of the layer at the source, of the rank at
    // the executor.
    const double sent = row_bytes * (1 + rate);
    const double received = row_bytes * (1 + (forward[g] > 0 ? backward[g] / forward[g] : 0));
    rows[g] = {static_cast<double>(links.sent_on_node[g]) * sent,
               static_cast<double>(links.sent_off_node[g]) * sent,
               static_cast<double>(links.received_on_node[g]) * received,
               static_cast<double>(links.received_off_node[g]) * received};
    moves_us = std::max(moves_us, static_cast<double>(moves.sent[g]) *
                                      static_cast<double>(work.memory.staged_moved_row_bytes) /
                                      (bandwidth.intra_node_gb_per_s * 1e3));
    out.compute = std::max(out.compute, (forward[g] + 2 * backward[g]) / 3 / ranks[g].rows_per_ms * 1e3);
  }
  out.weights = Slowest(weights, bandwidth);
  out.gradients = Slowest(gradients, bandwidth);
  out.return_ = Slowest(rows, bandwidth);
  out.dispatch = out.return_ + moves_us;
  return out;
}

}  // namespace lrmoe::planner
