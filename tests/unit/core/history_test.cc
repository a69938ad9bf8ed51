// The plans kept for the admin API.
#include "controller/core/history.h"

#include <catch2/catch.hpp>

namespace lrmoe::core {
namespace {

PlanRecord Made(int64_t step, int32_t layer, double retention = 1.0) {
  auto plan = std::make_shared<ExecutionPlan>();
  plan->plan.invocation = {step, layer, 0};
  plan->plan.retention_rate = retention;
  plan->plan.plan_us = static_cast<double>(step);
  plan->plan.quota = {1, 2};
  return {.plan = std::move(plan), .routed_rows = 3};
}

PlanRecord Failed(int64_t step, int32_t layer) {
  auto plan = std::make_shared<ExecutionPlan>();
  plan->plan.invocation = {step, layer, 0};
  plan->plan.feasible = false;
  return {.plan = std::move(plan), .error = "memory of rank 0"};
}

TEST_CASE("history: newest first, filtered, in pages") {
  History history(1000, 1 << 30);
  for (int64_t step = 0; step < 20; ++step)
    for (int32_t layer = 0; layer < 3; ++layer) history.Add(Made(step, layer));
  history.Add(Failed(20, 1));
  bool more = false;
  const auto page = history.List({.from_step = 5, .to_step = 9, .layer = 2, .limit = 3}, &more);
  REQUIRE(page.size() == 3);
  CHECK(more);
  CHECK(page[0]->plan->plan.invocation == Invocation{9, 2, 0});
  const auto rest = history.List(
      {.from_step = 5, .to_step = 9, .layer = 2, .before_number = page.back()->number, .limit = 3}, &more);
  REQUIRE(rest.size() == 2);
  CHECK_FALSE(more);
  CHECK(rest[1]->plan->plan.invocation == Invocation{5, 2, 0});
  CHECK(history.List({.infeasible_only = true}, &more).size() == 1);
  CHECK(history.num_made() == 60);
  CHECK(history.num_infeasible() == 1);
  CHECK(history.PlanMicroseconds(0.5) == 9);
  CHECK(history.PlanMicroseconds(1.0) == 19);
  CHECK(history.Layers().at(1).last->plan.invocation.step == 19);  // not the failure
  CHECK(history.FindLatest(1)->plan->plan.invocation.step == 19);
  CHECK(history.Find({20, 1, 0})->error == "memory of rank 0");
  CHECK(history.Find({20, 2, 0}) == nullptr);
  CHECK(History(5, 1 << 20).PlanMicroseconds(0.5) == 0);
}

TEST_CASE("history: bounded in number and bytes, reports included") {
  History history(5, 1 << 20);
  for (int64_t step = 0; step < 50; ++step) history.Add(Made(step, 0));
  CHECK(history.num_kept() == 5);
  CHECK(history.Find({44, 0, 0}) == nullptr);
  CHECK(history.Find({45, 0, 0}) != nullptr);
  InvocationReport report;
  report.invocation = {44, 0, 0};
  CHECK_FALSE(history.AddReport(0, report));
  report.invocation = {49, 0, 0};
  for (int32_t rank = 0; rank < 1024; ++rank) CHECK(history.AddReport(rank, report));
  CHECK(history.AddReport(3, report));
  CHECK(history.Find({49, 0, 0})->reports.size() == 1024);

  History tight(1000, 10'000);
  for (int64_t step = 0; step < 100; ++step) tight.Add(Made(step, 0));
  CHECK(tight.num_kept() >= 1);
  CHECK(tight.num_kept() < 100);
  report.invocation = {99, 0, 0};
  for (int32_t rank = 0; rank < 1000; ++rank) tight.AddReport(rank, report);
  CHECK(tight.num_kept() == 1);  // the newest stays
}

TEST_CASE("history: an invocation planned again is found as the newest") {
  History history(3, 1 << 20);
  history.Add(Made(1, 0, 0.5));
  history.Add(Made(1, 0, 0.7));
  history.Add(Made(2, 0));
  history.Add(Made(3, 0));  // drops the first
  REQUIRE(history.Find({1, 0, 0}) != nullptr);
  CHECK(history.Find({1, 0, 0})->plan->plan.retention_rate == 0.7);
}

TEST_CASE("history: goes on where an earlier run ended, gaps and all") {
  History history(3, 1 << 20);
  for (uint64_t number : {2, 5, 6, 9}) {
    PlanRecord record = number == 6 ? Failed(6, 0) : Made(static_cast<int64_t>(number), 0);
    record.number = number;
    history.Restore(std::move(record));
  }
  history.RestoreTally(8, 1);
  CHECK(history.num_kept() == 3);
  CHECK(history.oldest_number() == 5);
  CHECK(history.num_made() == 8);
  CHECK(history.num_infeasible() == 1);
  CHECK(history.Find({2, 0, 0}) == nullptr);
  CHECK(history.Find({5, 0, 0})->number == 5);
  CHECK(history.Find({9, 0, 0})->number == 9);
  CHECK(history.FindLatest(0)->number == 9);
  CHECK(history.Add(Made(10, 0)).number == 10);
  CHECK(history.oldest_number() == 6);
  CHECK(history.num_made() == 9);
  InvocationReport report;
  report.invocation = {9, 0, 0};
  CHECK(history.AddReport(1, report)->number == 9);
  CHECK(History(3, 1 << 20).oldest_number() == 1);
}

TEST_CASE("history: a report that makes its own record go leaves nothing to point at") {
  History history(1000, 10'000);
  history.Add(Made(1, 0));
  history.Add(Made(2, 0));
  InvocationReport report;
  report.invocation = {1, 0, 0};
  const PlanRecord* kept = nullptr;
  for (int32_t rank = 0; (kept = history.AddReport(rank, report)) != nullptr; ++rank) REQUIRE(rank < 1000);
  CHECK(history.num_kept() == 1);
  CHECK(history.Find({2, 0, 0}) != nullptr);
}

}  // namespace
}  // namespace lrmoe::core
