// State directories and records for the store's tests.
#pragma once

#include <catch2/catch.hpp>
#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "controller/store/store.h"

namespace lrmoe::store {

constexpr auto kPatience = std::chrono::seconds(60);  // a test that hangs, fails

class TemporaryDirectory {
 public:
  TemporaryDirectory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "lrmoe-store-XXXXXX").string();
    REQUIRE(mkdtemp(pattern.data()) != nullptr);
    path_ = pattern;
  }
  ~TemporaryDirectory() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }
  std::string state() const { return path_ + "/state"; }
  std::string database() const { return state() + "/lrmoe.db"; }

 private:
  std::string path_;
};

inline std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), {}};
}

inline void WriteFile(const std::string& path, const std::string& text) {
  std::ofstream(path, std::ios::binary) << text;
}

// Two ranks, two experts, a replica: every part of a plan is there.
inline core::PlanRecord Made(int64_t step, int32_t layer = 0) {
  auto plan = std::make_shared<ExecutionPlan>();
  LayerPlan& to = plan->plan;
  to.invocation = {step, layer, 1};
  to.policy = "lrmoe";
  to.retention_rate = 0.8;
  to.quota = {8, 4};
  to.instances = {{0, 0, true, false, 6, 5, {4, 2}},
                  {0, 1, false, true, 4, 3, {0, 4}},
                  {1, 1, true, false, 5, 4, {3, 2}}};
  to.ranks = {{6, 5, {1, 2, 3, 4}}, {9, 7, {5, 6, 7, 8}}};
  to.imbalance = {1.5, 1.2, 1.1};
  to.new_replicas = 1;
  to.predicted_us = {1, 2, 3, 4, 5};
  to.rejected = {{1.0, "memory", "rank 1", 10, 5, "bytes"}};
  to.plan_us = 17.5;
  plan->selection = Selection::kRandom;
  plan->seed = 99;
  return {.epoch = Epoch{3}, .plan = std::move(plan), .routed_rows = 15, .planned_at_ms = 1000 + step};
}

inline core::PlanRecord Failed(int64_t step) {
  auto plan = std::make_shared<ExecutionPlan>();
  plan->plan.invocation = {step, 2, 0};
  plan->plan.feasible = false;
  return {.epoch = Epoch{3}, .plan = std::move(plan), .error = "memory of rank 0", .planned_at_ms = 7};
}

inline InvocationReport Report(const core::PlanRecord& record, double total_ms) {
  InvocationReport report{.invocation = record.plan->plan.invocation};
  report.backward.total_ms = total_ms;
  report.routed_rows = 8;
  report.kept_rows = 4;
  return report;
}

inline core::EpochRecord SomeEpoch(uint64_t number = 3) {
  core::EpochRecord epoch{
      .epoch = Epoch{number}, .state = core::EpochState::kEnded, .reason = "all ranks left"};
  for (int32_t rank = 0; rank < 2; ++rank)
    epoch.hellos.push_back({.rank_idx = rank,
                            .world_size = 2,
                            .job = "job",
                            .node = "n",
                            .device = "cpu",
                            .memory_budget_bytes = 1 << 20,
                            .replica_slots = 2,
                            .rows_per_ms = 10});
  epoch.model = ModelSpec{.num_layers = 3};
  epoch.model->shape = {.num_experts = 2, .top_k = 1, .hidden_size = 8, .intermediate_size = 8};
  return epoch;
}

// A controller's part in it: a history, and the store that follows it.
struct Run {
  explicit Run(const std::string& directory, Policy configured = {}, int32_t max_plans = 1000,
               StoreOptions options = {})
      : policy(std::move(configured)), history(max_plans, int64_t{1} << 30) {
    options.directory = directory;
    absl::StatusOr<std::unique_ptr<Store>> opened = Store::Open(options, &policy);
    status = opened.status();
    if (!status.ok()) return;
    store = *std::move(opened);
    absl::StatusOr<Store::Restored> loaded = store->Load(&history);
    status = loaded.status();
    if (status.ok()) restored = *std::move(loaded);
  }

  const core::PlanRecord& Add(core::PlanRecord record) {
    const core::PlanRecord& kept = history.Add(std::move(record));
    store->AddPlan(kept, history);
    return kept;
  }
  void AddReport(int32_t rank, const InvocationReport& report) {
    const core::PlanRecord* kept = history.AddReport(rank, report);
    REQUIRE(kept != nullptr);
    store->AddReport(*kept, rank, report, history);
  }
  absl::Status Close() { return store->Close(After(kPatience)); }
  // Until nothing waits any more, written or lost.
  StoreState Settled() const {
    const Deadline deadline = After(kPatience);
    while (store->state().waiting > 0 && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    return store->state();
  }

  Policy policy;
  core::History history;
  absl::Status status;
  std::unique_ptr<Store> store;
  Store::Restored restored;
};

// Newest first.
inline std::vector<const core::PlanRecord*> All(const core::History& history) {
  bool more = false;
  return history.List({.limit = SIZE_MAX}, &more);
}

inline bool Same(const core::PlanRecord& a, const core::PlanRecord& b) {
  return a.number == b.number && a.epoch == b.epoch && *a.plan == *b.plan && a.error == b.error &&
         a.routed_rows == b.routed_rows && a.planned_at_ms == b.planned_at_ms && a.reports == b.reports;
}

inline void CheckSame(const core::History& a, const core::History& b) {
  const auto first = All(a), second = All(b);
  REQUIRE(first.size() == second.size());
  for (size_t i = 0; i < first.size(); ++i) CHECK(Same(*first[i], *second[i]));
  CHECK(a.num_made() == b.num_made());
  CHECK(a.num_infeasible() == b.num_infeasible());
}

}  // namespace lrmoe::store
