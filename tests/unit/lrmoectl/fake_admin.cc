#include "tests/unit/lrmoectl/fake_admin.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "proto/convert.h"

namespace lrmoe::ctl {
namespace {

constexpr int64_t kMiB = 1 << 20;

v1::PlanRecord Record(const LayerPlan& plan, int64_t planned_at_ms) {
  v1::PlanRecord record;
  ToWire(plan, record.mutable_plan());
  for (const InstancePlan& instance : plan.instances)
    record.set_routed_rows(record.routed_rows() + instance.forward_rows);
  record.set_planned_at_ms(planned_at_ms);
  return record;
}

void AddReport(v1::PlanRecord* record, int32_t rank) {
  InvocationReport report;
  ToWire(report, record->add_reports()->mutable_report());
  v1::RankReport* added = record->mutable_reports(record->reports_size() - 1);
  added->set_rank(rank);
  v1::InvocationReport* figures = added->mutable_report();
  *figures->mutable_invocation() = record->plan().invocation();
  figures->mutable_forward_ms()->set_compute(1.5 + rank);
  figures->mutable_forward_ms()->set_total(2.25 + rank);
  figures->mutable_backward_ms()->set_compute(3.0 + rank);
  figures->mutable_backward_ms()->set_score(0.125);
  figures->mutable_backward_ms()->set_total(4.75 + rank);
  figures->set_routed_rows(100);
  figures->set_kept_rows(80);
  figures->set_forward_rows(100);
  figures->set_backward_rows(80);
  figures->set_moved_rows(4);
  figures->set_dispatch_bytes(65536);
  figures->set_peak_bytes(3 * kMiB);
  figures->set_predicted_bytes(3 * kMiB + 300 * 1024);
  figures->set_kept_score(9.5);
  figures->set_total_score(10.0);
}

grpc::Status ToGrpc(const absl::Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), std::string(status.message()));
}

}  // namespace

LayerPlan SamplePlan(const Invocation& invocation) {
  LayerPlan plan;
  plan.invocation = invocation;
  plan.policy = "lrmoe";
  plan.retention_rate = 0.8;
  plan.quota = {70, 20, 45, 25};
  plan.instances = {
      {0, 0, true, false, 80, 60, {50, 30}}, {0, 1, false, true, 20, 10, {10, 10}},
      {1, 0, true, false, 20, 20, {10, 10}}, {2, 1, true, false, 50, 45, {20, 30}},
      {3, 1, true, false, 30, 25, {10, 20}},
  };
  plan.ranks = {{100, 80, {2 * kMiB, 0, 300 * 1024, 64 * 1024}},
                {100, 80, {2 * kMiB, kMiB, 300 * 1024, 64 * 1024}}};
  plan.imbalance = {1.2, 1.0, 1.0};
  plan.new_replicas = 1;
  plan.predicted_us = {12.5, 340, 8200, 210, 95};
  plan.rejected = {{1.0, "memory", "rank 1", 4.0 * kMiB, 3.5 * kMiB, "bytes"},
                   {0.9, "window", "link 0 -> 1", 1200, 1000, "us"}};
  plan.plan_us = 340;
  return plan;
}

FakeAdmin::FakeAdmin() {
  const int64_t noon = 1796040000000;  // 2026-11-30 12:00:00 UTC
  for (int64_t step = 1; step <= 3; ++step) {
    LayerPlan plan = SamplePlan({step, 0, 0});
    if (step == 2) {
      plan.feasible = false;
      plan.quota[2] = 40;
      plan.instances[3].backward_rows = 40;
      plan.ranks[1].backward_rows = 75;
      plan.imbalance.backward = 80.0 / 77.5;
    }
    if (step == 3) {  // the replica's weights are there; most rows of expert 0 move to it
      plan.instances[0] = {0, 0, true, false, 30, 20, {20, 10}};
      plan.instances[1] = {0, 1, false, false, 70, 50, {40, 30}};
      plan.ranks[0] = {50, 40, plan.ranks[0].memory_bytes};
      plan.ranks[1] = {150, 120, plan.ranks[1].memory_bytes};
      plan.imbalance = {1.2, 1.5, 1.5};
      plan.new_replicas = 0;
      plan.rejected.clear();
    }
    history_.push_back(Record(plan, noon + step * 1000));
  }
  v1::PlanRecord none;
  ToWire(Invocation{2, 1, 0}, none.mutable_plan()->mutable_invocation());
  none.set_routed_rows(200);
  none.set_error("rank 1 needs 4194304 bytes, 3670016 are available");
  history_.insert(history_.begin() + 2, none);
  for (v1::PlanRecord& record : history_) record.set_epoch(3);
  AddReport(&history_[0], 1);
  AddReport(&history_[0], 0);
  grpc::ServerBuilder builder;
  int port = 0;
  builder.AddListeningPort("127.0.0.1:0", grpc::InsecureServerCredentials(), &port);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  LRMOE_CHECK(server_ != nullptr && port > 0);
  address_ = absl::StrCat("127.0.0.1:", port);
}

FakeAdmin::~FakeAdmin() {
  server_->Shutdown(std::chrono::system_clock::now());
}

grpc::Status FakeAdmin::GetStatus(Context* context, const v1::GetStatusRequest*,
                                  v1::ControllerStatus* status) {
  while (silent_ && !context->IsCancelled()) std::this_thread::yield();
  status->set_version("0.1.0");
  status->set_uptime_s(7384);
  status->set_epoch(3);
  status->set_epoch_state("running");
  status->set_ranks_expected(3);
  status->set_ranks_connected(2);
  status->add_missing_ranks(2);
  ModelSpec model;
  model.num_layers = 4;
  model.shape = {16, 4, 256, 128, true, Activation::kSilu, DataType::kBf16};
  ToWire(model, status->mutable_model());
  status->set_current_step(1204);
  status->set_plans_made(4816);
  status->set_plans_infeasible(1);
  status->set_plan_us_p50(340);
  status->set_plan_us_p99(1250);
  status->mutable_state_dir()->set_path("/var/lib/lrmoe");
  status->mutable_state_dir()->set_waiting(12);
  status->mutable_state_dir()->set_lost(3400);
  status->mutable_state_dir()->set_error("database or disk is full");
  return grpc::Status::OK;
}

grpc::Status FakeAdmin::ListWorkers(Context*, const v1::ListWorkersRequest*,
                                    v1::ListWorkersResponse* workers) {
  for (int32_t rank = 0; rank < 2; ++rank) {
    v1::WorkerStatus* worker = workers->add_workers();
    worker->set_rank(rank);
    worker->set_node("node-a");
    worker->set_device("cpu");
    worker->set_state(rank == 0 ? "connected" : "disconnected");
    worker->set_memory_budget_bytes(512 * kMiB);
    worker->set_replica_slots(2);
    worker->set_rows_per_ms(1234.5);
    worker->set_current_step(1204);
    worker->set_last_seen_s(rank == 0 ? 0.25 : 75);
    worker->set_peak_bytes(300 * kMiB);
    worker->set_version("0.1.0");
  }
  return grpc::Status::OK;
}

grpc::Status FakeAdmin::ListLayers(Context*, const v1::ListLayersRequest*, v1::ListLayersResponse* layers) {
  for (int32_t layer = 0; layer < 2; ++layer) {
    v1::LayerStatus* status = layers->add_layers();
    status->set_layer(layer);
    status->set_last_step(1204);
    status->set_retention_rate(0.85);
    status->set_retention_rate_mean(0.875);
    status->mutable_imbalance()->set_before(1.62);
    status->mutable_imbalance()->set_forward(1.01);
    status->mutable_imbalance()->set_backward(1.005);
    status->set_replicas(2);
    status->set_new_replicas(layer);
    status->set_routed_rows(8192);
    status->set_kept_rows(6963);
  }
  return grpc::Status::OK;
}

grpc::Status FakeAdmin::ListPlans(Context*, const v1::ListPlansRequest* request,
                                  v1::ListPlansResponse* plans) {
  ++num_list_calls_;
  if (pages_ == Pages::kEndless) {
    plans->set_next_page_token("again");
    return grpc::Status::OK;
  }
  size_t skip = request->page_token().empty() ? 0 : std::stoul(request->page_token());
  const size_t size =
      pages_ == Pages::kTooLong ? 100 : std::min(request->page_size(), 2);  // short pages are allowed
  size_t matched = 0;
  for (auto record = history_.rbegin(); record != history_.rend(); ++record) {
    const int64_t step = record->plan().invocation().step();
    if (step < request->from_step() || (request->has_to_step() && step > request->to_step())) continue;
    if (request->has_layer() && request->layer() != record->plan().invocation().layer()) continue;
    if (request->infeasible_only() && record->plan().feasible()) continue;
    if (++matched <= skip) continue;
    if (static_cast<size_t>(plans->plans_size()) == size) {
      plans->set_next_page_token(absl::StrCat(skip + size));
      break;
    }
    *plans->add_plans() = *record;
    plans->mutable_plans(plans->plans_size() - 1)->mutable_plan()->clear_instances();
    plans->mutable_plans(plans->plans_size() - 1)->clear_reports();
  }
  return grpc::Status::OK;
}

grpc::Status FakeAdmin::GetPlan(Context*, const v1::GetPlanRequest* request, v1::PlanRecord* record) {
  const v1::Invocation& wanted = request->invocation();
  for (auto it = history_.rbegin(); it != history_.rend(); ++it) {
    const v1::Invocation& known = it->plan().invocation();
    if (known.layer() != wanted.layer() || known.micro_batch() != wanted.micro_batch()) continue;
    if (!request->latest() && known.step() != wanted.step()) continue;
    *record = *it;
    if (lies_) record->mutable_plan()->set_quota(0, 71);
    return grpc::Status::OK;
  }
  return grpc::Status(grpc::StatusCode::NOT_FOUND,
                      "no plan of step 9 layer 0 micro-batch 0 is kept; kept: steps 1..3");
}

grpc::Status FakeAdmin::WatchPlans(Context* context, const v1::WatchPlansRequest*,
                                   grpc::ServerWriter<v1::PlanRecord>* writer) {
  for (const v1::PlanRecord& record : history_) writer->Write(record);
  while (!ends_stream_ && !context->IsCancelled()) std::this_thread::yield();
  return grpc::Status::OK;
}

grpc::Status FakeAdmin::GetPolicy(Context*, const v1::GetPolicyRequest*, v1::PolicySettings* policy) {
  ToWire(policy_, policy);
  return grpc::Status::OK;
}

grpc::Status FakeAdmin::SetPolicy(Context*, const v1::SetPolicyRequest* request,
                                  v1::SetPolicyResponse* response) {
  const absl::StatusOr<Policy> changed = ApplyWire(policy_, request->policy());
  if (!changed.ok()) return ToGrpc(changed.status());
  policy_ = *changed;
  ToWire(policy_, response->mutable_policy());
  response->set_from_step(1206);
  return grpc::Status::OK;
}

grpc::Status FakeAdmin::SimulatePlan(Context* context, const v1::SimulatePlanRequest* request,
                                     v1::SimulatePlanResponse* response) {
  simulated_ = *request;
  const grpc::Status found = GetPlan(context, &request->recorded(), response->mutable_recorded());
  if (!found.ok()) return found;
  // Symi moves owners: expert 0 is no longer where its owner is.
  LayerPlan plan = SamplePlan({1, 0, 0});
  plan.policy = request->planner().empty() ? "lrmoe" : request->planner();
  plan.instances.erase(plan.instances.begin());
  plan.instances[0] = {0, 1, false, true, 100, 70, {60, 40}};
  plan.ranks[0] = {20, 20, plan.ranks[0].memory_bytes};
  plan.ranks[1] = {180, lies_ ? 139 : 140, plan.ranks[1].memory_bytes};
  plan.imbalance = {1.2, 1.8, 1.75};
  ToWire(plan, response->mutable_simulated());
  return grpc::Status::OK;
}

grpc::Status FakeAdmin::Drain(Context*, const v1::DrainRequest* request, v1::DrainResponse* response) {
  drained_ = request->reason();
  response->set_ranks(2);
  return grpc::Status::OK;
}

}  // namespace lrmoe::ctl
