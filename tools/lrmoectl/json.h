// JSON forms shared by several views. Heavy: only for .cc files.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

#include "common/plan_json.h"
#include "lrmoe/v1/admin.pb.h"
#include "tools/lrmoectl/plan_record.h"

namespace lrmoe::ctl {

using Json = nlohmann::ordered_json;  // fields in the order they were written

// Indented for people too; text that is not UTF-8 is replaced, infinities become null.
std::string Dump(const Json& json);
std::string DumpLine(const Json& json);  // on one line

using lrmoe::ToJson;                        // of a plan's parts
Json ToJson(const Invocation& invocation);  // {step, layer, micro_batch}
Json ToJson(const RankReport& report);
// One entry of `plans list`, one line of `plans watch`.
Json PlanSummaryJson(const v1::PlanRecord& record);

}  // namespace lrmoe::ctl
