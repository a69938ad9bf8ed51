#include "tests/unit/convert/samples.h"

#include <algorithm>

#include "common/cluster.h"

namespace lrmoe::test {
namespace {

Invocation RandomInvocation(Random& random) {
  return {random.Between(0, int64_t{1} << 53), static_cast<int32_t>(random.Below(1024)),
          static_cast<int32_t>(random.Below(1 << 20))};
}

InstancePlan RandomInstance(Random& random, int32_t expert, int32_t rank, int32_t num_ranks) {
  InstancePlan instance{.expert_idx = expert, .rank_idx = rank};
  for (int32_t source = 0; source < num_ranks; ++source) {
    instance.forward_rows_by_source.push_back(random.Between(0, 100));
    instance.forward_rows += instance.forward_rows_by_source.back();
  }
  instance.backward_rows = random.Between(0, instance.forward_rows);
  return instance;
}

}  // namespace

ModelSpec SampleModel() {
  return {.num_layers = 4,
          .shape = {.num_experts = 16,
                    .top_k = 4,
                    .hidden_size = 256,
                    .intermediate_size = 128,
                    .gated = true,
                    .activation = Activation::kSilu,
                    .dtype = DataType::kFp32}};
}

ExecutionPlan RandomPlan(Random& random, int32_t num_experts, int32_t num_ranks) {
  ExecutionPlan execution{.selection = static_cast<Selection>(random.Between(1, 5)),
                          .router_gradient = static_cast<RouterGradient>(random.Between(1, 2)),
                          .seed = random.Next(),
                          .rescale = static_cast<Rescale>(random.Between(1, 2))};
  if (execution.selection == Selection::kLrmSampled) execution.rescale = Rescale::kOff;
  LayerPlan& plan = execution.plan;
  plan.invocation = RandomInvocation(random);
  plan.policy = "lrmoe";
  plan.feasible = random.Below(4) != 0;
  plan.retention_rate = random.Uniform();
  plan.ranks.resize(num_ranks);
  const std::vector<int32_t> owner = ContiguousOwners(num_experts, num_ranks);
  for (int32_t expert = 0; expert < num_experts; ++expert) {
    plan.instances.push_back(RandomInstance(random, expert, owner[expert], num_ranks));
    plan.instances.back().owner = true;
    for (int32_t rank = 0; rank < num_ranks; ++rank) {
      if (rank == owner[expert] || random.Below(3) != 0) continue;
      plan.instances.push_back(RandomInstance(random, expert, rank, num_ranks));
      plan.instances.back().is_new = random.Below(2) == 0;
      plan.new_replicas += plan.instances.back().is_new ? 1 : 0;
    }
    plan.quota.push_back(0);
  }
  for (const InstancePlan& instance : plan.instances) {
    plan.quota[instance.expert_idx] += instance.backward_rows;
    plan.ranks[instance.rank_idx].forward_rows += instance.forward_rows;
    plan.ranks[instance.rank_idx].backward_rows += instance.backward_rows;
  }
  for (RankPlan& rank : plan.ranks)
    rank.memory_bytes = {random.Between(0, 1 << 30), random.Between(0, 1 << 30), random.Between(0, 1 << 30),
                         random.Between(0, 1 << 30)};
  plan.imbalance = {1 + random.Uniform(), 1 + random.Uniform(), 1 + random.Uniform()};
  plan.predicted_us = {random.Uniform(), random.Uniform(), random.Uniform(), random.Uniform(),
                       random.Uniform()};
  if (random.Below(2) == 0) plan.rejected.push_back({1.0, "memory", "rank 0", 2e9, 1e9, "bytes"});
  plan.plan_us = random.Uniform() * 100;
  return execution;
}

InvocationReport RandomReport(Random& random) {
  InvocationReport report;
  report.invocation = RandomInvocation(random);
  for (InvocationReport::Phases* phases : {&report.forward, &report.backward})
    *phases = {random.Uniform(), random.Uniform(), random.Uniform(), random.Uniform(),
               random.Uniform(), random.Uniform(), random.Uniform(), random.Uniform(),
               random.Uniform(), random.Uniform(), random.Uniform()};
  report.routed_rows = random.Between(0, 1 << 20);
  report.kept_rows = random.Between(0, report.routed_rows);
  for (int64_t* rows :
       {&report.forward_rows, &report.backward_rows, &report.moved_rows, &report.dispatch_bytes,
        &report.return_bytes, &report.scalar_bytes, &report.peak_bytes, &report.predicted_bytes})
    *rows = random.Between(0, int64_t{1} << 40);
  report.total_score = random.Uniform();
  report.kept_score = random.Uniform();
  return report;
}

WorkerMessage RandomWorkerMessage(Random& random) {
  switch (random.Below(6)) {
    case 0: {
      Hello hello{
          .rank_idx = 1, .world_size = 4, .job = "job-a", .node = "n1", .device = "cpu", .version = "0.1.0"};
      hello.memory_budget_bytes = random.Between(0, INT64_MAX);
      hello.replica_slots = static_cast<int32_t>(random.Below(8));
      hello.rows_per_ms = random.Uniform();
      hello.intra_node_gb_per_s = random.Uniform();
      hello.inter_node_gb_per_s = random.Uniform();
      hello.epoch = Epoch{random.Next()};
      hello.recompute_activation = random.Below(2) == 0;
      hello.packs_bf16_weights = random.Below(2) == 0;
      hello.packs_fp32_weights = random.Below(2) == 0;
      hello.optimizer_on_device = random.Below(2) == 0;
      return hello;
    }
    case 1: {
      SourceCounts counts{.invocation = RandomInvocation(random)};
      counts.counts.resize(random.Between(1, 64));
      for (int64_t& count : counts.counts) count = random.Between(0, int64_t{1} << 40);
      return counts;
    }
    case 2:
      return RandomReport(random);
    case 3:
      return Heartbeat{random.Between(0, 1000)};
    case 4:
      return Leaving{"loss is NaN", random.Below(2) == 0};
    default:
      return SampleModel();
  }
}

ControllerMessage RandomControllerMessage(Random& random) {
  Policy policy{.rates = {0.9, 0.7}, .window_us = 100.0 + random.Uniform(), .seed = random.Next()};
  switch (random.Below(6)) {
    case 0:
      return Welcome{Epoch{random.Next() | 1}, policy};
    case 1:
      return RandomPlan(random, static_cast<int32_t>(random.Between(1, 20)),
                        static_cast<int32_t>(random.Between(1, 6)));
    case 2:
      return PolicyChange{policy, random.Between(0, 1000)};
    case 3:
      return Abort{"rank 3 on n2 is gone"};
    case 4:
      return Drain{"controller stopping"};
    default:
      return PlanError{RandomInvocation(random), absl::ResourceExhaustedError("memory of rank 0")};
  }
}

}  // namespace lrmoe::test
