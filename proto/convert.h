// Wire <-> domain. Everything that comes from outside is validated here, once: FromWire returns
// InvalidArgument that names the field (with its position), its value and the allowed range; a value it
// returns may be used unchecked. ToWire of a valid value cannot fail, and FromWire(ToWire(x)) == x. Pure; any
// thread.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/plan.h"
#include "common/policy.h"
#include "common/report.h"
#include "common/session.h"
#include "lrmoe/v1/controller.pb.h"

namespace lrmoe {

// Absolute limits of the protocol; a controller may be configured with tighter ones.
inline constexpr uint32_t kProtocolVersion = 1;
inline constexpr int32_t kMaxRanks = 1024;
inline constexpr int32_t kMaxExperts = 4096;
inline constexpr int32_t kMaxLayers = 1024;
inline constexpr int32_t kMaxMicroBatches = 1 << 20;
inline constexpr int64_t kMaxStep = int64_t{1} << 53;   // exact in JSON
inline constexpr int64_t kMaxCount = int64_t{1} << 40;  // pairs of one source and expert
// The largest message of each direction. A worker sends at most its counts (4096 experts). A plan names a row
// count per instance and source: 512 experts on 1024 ranks with one replica each is about 5 MB.
inline constexpr int kMaxWorkerMessageBytes = 1 << 20;
inline constexpr int kMaxControllerMessageBytes = 64 << 20;

void ToWire(const Invocation& invocation, v1::Invocation* wire);
absl::StatusOr<Invocation> FromWire(const v1::Invocation& wire);

void ToWire(const ModelSpec& model, v1::ModelSpec* wire);
absl::StatusOr<ModelSpec> FromWire(const v1::ModelSpec& wire);

// All fields. FromWire starts from the defaults and sets the fields that are there.
void ToWire(const Policy& policy, v1::PolicySettings* wire);
absl::StatusOr<Policy> FromWire(const v1::PolicySettings& wire);
// `base` with the named fields changed; a field named twice is refused.
absl::StatusOr<Policy> ApplyWire(const Policy& base, const v1::PolicySettings& wire);

// A plan to execute: rows conserved per expert, source and rank, one owner and at most one instance per
// expert and rank, in the order of LayerPlan::instances. (Plans in admin lists come without instances and are
// refused here.)
void ToWire(const LayerPlan& plan, v1::LayerPlan* wire);
absl::StatusOr<LayerPlan> FromWire(const v1::LayerPlan& wire);
// A plan to look at: the same, but for an expert whose owner need not hold an instance of it.
absl::StatusOr<LayerPlan> SimulatedFromWire(const v1::LayerPlan& wire);

void ToWire(const ExecutionPlan& plan, v1::ExecutionPlan* wire);
absl::StatusOr<ExecutionPlan> FromWire(const v1::ExecutionPlan& wire);

void ToWire(const InvocationReport& report, v1::InvocationReport* wire);
absl::StatusOr<InvocationReport> FromWire(const v1::InvocationReport& wire);

void ToWire(const WorkerMessage& message, v1::WorkerMessage* wire);
absl::StatusOr<WorkerMessage> FromWire(const v1::WorkerMessage& wire);

void ToWire(const ControllerMessage& message, v1::ControllerMessage* wire);
absl::StatusOr<ControllerMessage> FromWire(const v1::ControllerMessage& wire);

}  // namespace lrmoe
