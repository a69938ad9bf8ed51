// Settings and limits of the controller's brain. Every queue, table and wait of it has its limit here.
#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "common/policy.h"

namespace lrmoe::core {

struct CoreOptions {
  // World size a job must have; 0: whatever the first hello of a job says. 0..max_ranks.
  int32_t ranks = 0;
  Policy policy;  // in force until the first change

  // A model or a group beyond these is refused. They bound the memory of one plan: experts x ranks row
  // counts.
  int32_t max_ranks = 1024;    // 1..1024
  int32_t max_layers = 1024;   // 1..1024
  int32_t max_experts = 4096;  // 1..4096
  // Streams open at once, said hello or not: twice the ranks leaves room for every rank to
  // reconnect. 1..65536
  int32_t max_sessions = 2048;
  // Invocations whose counts are in but whose plan is not out. Workers wait for one at a time, so more than a
  // few per layer means ranks that have lost each other. 1..65536
  int32_t max_queued_invocations = 1024;
  // Plans kept for ranks that send their counts again: at least layers x micro-batches of a step, so that
  // recomputation finds them. The history for the admin API has the same two limits. 1..1048576; 1 MiB..1 TiB
  int32_t max_plans_kept = 4096;
  int64_t max_plan_bytes_kept = int64_t{512} << 20;
  // Policy changes that were announced and are not yet in force on every rank. 2..1024
  int32_t max_policy_changes = 64;

  // A stream that says no hello within this is closed. 1 ms..1 h
  int64_t hello_timeout_us = 5'000'000;
  // How long a lost session may take to come back before its epoch is aborted. 0 (at once)..1 h
  int64_t reconnect_grace_us = 2'000'000;
  // A rank that others wait for longer than this is named in status and log. 1 ms..1 h
  int64_t missing_after_us = 10'000'000;
};

// InvalidArgument naming the setting, its value and the allowed range.
absl::Status Validate(const CoreOptions& options);

}  // namespace lrmoe::core
