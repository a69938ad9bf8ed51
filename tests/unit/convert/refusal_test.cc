// Bad wire values are refused with the field, the value and the range; nothing crashes on any bytes.
#include <google/protobuf/stubs/logging.h>
#include <catch2/catch.hpp>
#include <functional>
#include <limits>
#include <string>

#include "proto/convert.h"
#include "tests/unit/convert/samples.h"

namespace lrmoe {
namespace {

using Catch::Matchers::Contains;

struct Mutation {
  const char* expected;  // part of the error
  std::function<void(v1::WorkerMessage&)> apply;
};

v1::WorkerMessage Wire(const WorkerMessage& message) {
  v1::WorkerMessage wire;
  ToWire(message, &wire);
  return wire;
}

void Refuses(const WorkerMessage& base, const std::vector<Mutation>& mutations) {
  REQUIRE(FromWire(Wire(base)).ok());
  for (const Mutation& mutation : mutations) {
    v1::WorkerMessage wire = Wire(base);
    mutation.apply(wire);
    const auto result = FromWire(wire);
    CHECK(result.status().code() == absl::StatusCode::kInvalidArgument);
    CHECK_THAT(std::string(result.status().message()), Contains(mutation.expected));
  }
}

TEST_CASE("hello: each field is checked") {
  const Hello hello{.rank_idx = 1, .world_size = 4, .job = "a", .node = "n"};
  Refuses(hello,
          {
              {"hello.protocol_version is 2; allowed: 1..1",
               [](auto& m) { m.mutable_hello()->set_protocol_version(2); }},
              {"hello.rank is 4; allowed: 0..3", [](auto& m) { m.mutable_hello()->set_rank(4); }},
              {"hello.rank is -1; allowed: 0..3", [](auto& m) { m.mutable_hello()->set_rank(-1); }},
              {"hello.world_size is 1025; allowed: 1..1024",
               [](auto& m) { m.mutable_hello()->set_world_size(1025); }},
              {"hello.job is \"\" (0 bytes); allowed: 1..128 bytes",
               [](auto& m) { m.mutable_hello()->clear_job(); }},
              {"hello.job is \"xxxx", [](auto& m) { m.mutable_hello()->set_job(std::string(129, 'x')); }},
              {"hello.node", [](auto& m) { m.mutable_hello()->set_node(""); }},
              {"hello.memory_budget_bytes is -5",
               [](auto& m) { m.mutable_hello()->set_memory_budget_bytes(-5); }},
              {"hello.replica_slots is 4097", [](auto& m) { m.mutable_hello()->set_replica_slots(4097); }},
              {"hello.rows_per_ms is nan; allowed: a finite number >= 0",
               [](auto& m) { m.mutable_hello()->set_rows_per_ms(std::numeric_limits<double>::quiet_NaN()); }},
              {"hello.inter_node_gb_per_s is inf",
               [](auto& m) {
                 m.mutable_hello()->set_inter_node_gb_per_s(std::numeric_limits<double>::infinity());
               }},
          });
}

TEST_CASE("counts, reports, heartbeats, models: each field is checked") {
  const SourceCounts counts{{3, 1, 0}, {1, 2, 3}};
  Refuses(counts, {
                      {"counts.invocation.step is -1",
                       [](auto& m) { m.mutable_counts()->mutable_invocation()->set_step(-1); }},
                      {"counts.invocation.layer is 1024; allowed: 0..1023",
                       [](auto& m) { m.mutable_counts()->mutable_invocation()->set_layer(1024); }},
                      {"counts.invocation.micro_batch is -2",
                       [](auto& m) { m.mutable_counts()->mutable_invocation()->set_micro_batch(-2); }},
                      {"counts.counts[1] is -7; allowed: 0..1099511627776",
                       [](auto& m) { m.mutable_counts()->set_counts(1, -7); }},
                      {"counts.number of counts is 0", [](auto& m) { m.mutable_counts()->clear_counts(); }},
                      {"message is unset", [](auto& m) { m.Clear(); }},
                  });
  Random random(3);
  Refuses(test::RandomReport(random),
          {
              {"report.forward_ms.dispatch is -1",
               [](auto& m) { m.mutable_report()->mutable_forward_ms()->set_dispatch(-1); }},
              {"report.kept_rows is 11; allowed: 0..10",
               [](auto& m) {
                 m.mutable_report()->set_routed_rows(10);
                 m.mutable_report()->set_kept_rows(11);
               }},
              {"report.total_score is inf",
               [](auto& m) { m.mutable_report()->set_total_score(std::numeric_limits<double>::infinity()); }},
          });
  Refuses(Heartbeat{1},
          {{"heartbeat.current_step is -1", [](auto& m) { m.mutable_heartbeat()->set_current_step(-1); }}});
  Refuses(test::SampleModel(),
          {
              {"model.", [](auto& m) { m.mutable_model()->set_num_experts(0); }},
              {"model.", [](auto& m) { m.mutable_model()->set_num_layers(5000); }},
              {"model.dtype is 3; allowed: 1 (bf16), 2 (fp32)",
               [](auto& m) { m.mutable_model()->set_dtype(v1::DATA_TYPE_INT32); }},
              {"model.activation is 0", [](auto& m) { m.mutable_model()->clear_activation(); }},
          });
}

v1::LayerPlan SamplePlan() {
  Random random(7);
  ExecutionPlan plan = test::RandomPlan(random, 6, 3);
  v1::LayerPlan wire;
  ToWire(plan.plan, &wire);
  return wire;
}

void RefusesPlan(const char* expected, const std::function<void(v1::LayerPlan&)>& apply) {
  v1::LayerPlan wire = SamplePlan();
  REQUIRE(FromWire(wire).ok());
  apply(wire);
  const auto result = FromWire(wire);
  CHECK(result.status().code() == absl::StatusCode::kInvalidArgument);
  CHECK_THAT(std::string(result.status().message()), Contains(expected));
}

TEST_CASE("plan: rows that are not conserved and instances out of place are refused") {
  RefusesPlan("forward_rows_by_source[0] is -1",
              [](auto& p) { p.mutable_instances(0)->set_forward_rows_by_source(0, -1); });
  RefusesPlan("plan.instances[0].forward_rows is",
              [](auto& p) { p.mutable_instances(0)->set_forward_rows(p.instances(0).forward_rows() + 1); });
  RefusesPlan("plan.instances[0].number of forward_rows_by_source is 4; allowed: 3..3",
              [](auto& p) { p.mutable_instances(0)->add_forward_rows_by_source(0); });
  RefusesPlan("plan.quota[2]", [](auto& p) { p.set_quota(2, p.quota(2) + 1); });
  RefusesPlan("plan.ranks[1].backward_rows",
              [](auto& p) { p.mutable_ranks(1)->set_backward_rows(p.ranks(1).backward_rows() - 1); });
  RefusesPlan(".owner is false", [](auto& p) { p.mutable_instances(0)->set_owner(false); });
  RefusesPlan("number of instances of expert 5 is 0", [](auto& p) {
    while (p.instances(p.instances_size() - 1).expert() == 5) p.mutable_instances()->RemoveLast();
  });
  RefusesPlan("plan.instances[0].expert is 6; allowed: 0..5",
              [](auto& p) { p.mutable_instances(0)->set_expert(6); });
  RefusesPlan("plan.instances[0].rank is 3; allowed: 0..2",
              [](auto& p) { p.mutable_instances(0)->set_rank(3); });
  RefusesPlan("plan.new_replicas", [](auto& p) { p.set_new_replicas(p.new_replicas() + 1); });
  RefusesPlan("plan.retention_rate is 1.5; allowed: 0..1", [](auto& p) { p.set_retention_rate(1.5); });
  RefusesPlan("number of plan.quota is 0", [](auto& p) { p.clear_quota(); });
  RefusesPlan("plan.policy", [](auto& p) { p.clear_policy(); });
  RefusesPlan("plan.imbalance is nan",
              [](auto& p) { p.mutable_imbalance()->set_before(std::numeric_limits<double>::quiet_NaN()); });
  RefusesPlan("number of instances of expert 0 is 0", [](auto& p) { p.clear_instances(); });
}

TEST_CASE("plan: an expert twice on a rank is refused") {
  Random random(11);
  ExecutionPlan plan = test::RandomPlan(random, 1, 2);
  LayerPlan& layer = plan.plan;
  InstancePlan again = layer.instances.front();
  again.owner = false;
  layer.instances = {layer.instances.front(), again};
  layer.new_replicas = 0;
  v1::LayerPlan wire;
  ToWire(layer, &wire);
  CHECK_THAT(std::string(FromWire(wire).status().message()), Contains("at most one instance per rank"));
}

TEST_CASE("plan: settings that no rank could execute are refused") {
  Random random(12);
  v1::ExecutionPlan good;
  ToWire(test::RandomPlan(random, 4, 2), &good);
  good.set_selection(v1::SELECTION_LRM_SAMPLED);
  good.set_rescale(v1::RESCALE_OFF);
  REQUIRE(FromWire(good).ok());
  const auto message = [](const v1::ExecutionPlan& wire) {
    return std::string(FromWire(wire).status().message());
  };
  v1::ExecutionPlan bad = good;
  bad.set_rescale(v1::RESCALE_ROWS);
  CHECK_THAT(message(bad), Contains("rescale is RESCALE_ROWS; allowed: RESCALE_OFF with SELECTION_LRM"));
  bad = good;
  bad.set_rescale(v1::RESCALE_UNSPECIFIED);
  CHECK_THAT(message(bad), Contains("rescale is 0; allowed: 1..2"));
  bad = good;
  bad.set_selection(static_cast<v1::Selection>(6));
  CHECK_THAT(message(bad), Contains("selection is 6; allowed: 1..5"));
}

TEST_CASE("policy: unknown, repeated and bad fields are refused, the named ones change") {
  v1::PolicySettings wire;
  wire.add_fields()->set_name("rates");
  wire.mutable_fields(0)->set_value("0.8");
  const auto changed = ApplyWire(Policy{.seed = 5}, wire);
  REQUIRE(changed.ok());
  CHECK(*changed == Policy{.rates = {0.8}, .seed = 5});
  *wire.add_fields() = wire.fields(0);
  CHECK_THAT(std::string(ApplyWire(Policy{}, wire).status().message()), Contains("rates is given twice"));
  wire.mutable_fields(1)->set_name("speed");
  CHECK_THAT(std::string(ApplyWire(Policy{}, wire).status().message()),
             Contains("unknown policy field \"speed\""));
}

// A flipped byte either fails to parse, is refused, or gives a value that survives another round trip.
TEST_CASE("mutated bytes never pass as an invalid value") {
  google::protobuf::LogSilencer silencer;  // protobuf prints every text that is not UTF-8
  Random random(13);
  int parsed = 0, accepted = 0;
  for (int i = 0; i < 20000; ++i) {
    v1::ControllerMessage wire;
    ToWire(test::RandomControllerMessage(random), &wire);
    std::string bytes = wire.SerializeAsString();
    for (int64_t flips = random.Between(1, 3); flips > 0 && !bytes.empty(); --flips)
      bytes[random.Below(bytes.size())] ^= static_cast<char>(1 << random.Below(8));
    v1::ControllerMessage read;
    if (!read.ParseFromString(bytes)) continue;
    ++parsed;
    const auto value = FromWire(read);
    if (!value.ok()) continue;
    ++accepted;
    v1::ControllerMessage again;
    ToWire(*value, &again);
    const auto back = FromWire(again);
    REQUIRE(back.status() == absl::OkStatus());
    REQUIRE(*back == *value);
  }
  CHECK(parsed > 1000);
  CHECK(accepted > 100);
}

TEST_CASE("random bytes as a worker message never crash") {
  google::protobuf::LogSilencer silencer;
  Random random(17);
  for (int i = 0; i < 50000; ++i) {
    std::string bytes(random.Below(64), '\0');
    for (char& byte : bytes) byte = static_cast<char>(random.Next());
    v1::WorkerMessage wire;
    if (wire.ParseFromString(bytes)) (void)FromWire(wire);
  }
}

}  // namespace
}  // namespace lrmoe
