// trace export: the counts of the plans that the controller still remembers, as a trace that lrmoe-sim
// replays.
#include <fstream>
#include <map>
#include <ostream>
#include <tuple>

#include "absl/strings/str_cat.h"
#include "common/plan_counts.h"
#include "common/status_macros.h"
#include "common/trace.h"
#include "tools/lrmoectl/fetch.h"
#include "tools/lrmoectl/json.h"

namespace lrmoe::ctl {
namespace {

struct Export {
  int64_t num_written = 0;
  int64_t num_gone = 0;    // dropped from the history while it was read
  int64_t num_failed = 0;  // no plan was made
};

// Invocations of the newest epoch that has plans, in the order of a trace: a rank count does not change
// within one.
absl::StatusOr<std::vector<Invocation>> ListInvocations(AdminClient& client, const Options& options,
                                                        Export& result) {
  PlanFilter filter = options.filter;
  filter.limit = std::numeric_limits<int32_t>::max();
  LRMOE_ASSIGN_OR_RETURN(const v1::ListPlansResponse plans, FetchPlans(client, filter));
  std::map<std::tuple<int64_t, int32_t, int32_t>, Invocation> ordered;
  for (const v1::PlanRecord& record : plans.plans()) {  // newest first
    if (record.epoch() != plans.plans(0).epoch()) break;
    const v1::Invocation& at = record.plan().invocation();
    if (!record.error().empty()) {
      ++result.num_failed;
    } else {
      ordered.try_emplace({at.step(), at.micro_batch(), at.layer()},
                          Invocation{at.step(), at.layer(), at.micro_batch()});
    }
  }
  std::vector<Invocation> invocations;
  for (const auto& [key, invocation] : ordered) invocations.push_back(invocation);
  return invocations;
}

absl::Status WriteTrace(AdminClient& client, const Options& options, std::ostream& out, Export& result) {
  LRMOE_ASSIGN_OR_RETURN(const v1::ControllerStatus status, client.GetStatus());
  LRMOE_ASSIGN_OR_RETURN(const std::vector<Invocation> invocations, ListInvocations(client, options, result));
  std::optional<TraceWriter> writer;
  for (const Invocation& invocation : invocations) {
    const absl::StatusOr<PlanRecord> record = FetchPlan(client, invocation, false);
    if (record.status().code() == absl::StatusCode::kNotFound) {
      ++result.num_gone;
      continue;
    }
    LRMOE_RETURN_IF_ERROR(record.status());
    TraceRecord line{invocation, CountsOf(record->plan)};
    if (!writer.has_value()) {
      TraceHeader header;
      header.model = "job";
      header.num_experts = line.counts.num_experts();
      header.top_k = status.model().top_k();
      header.num_source_ranks = line.counts.num_sources();
      header.num_layers = status.model().num_layers();
      header.remarks = {
          {"origin", absl::StrCat("lrmoe-controller ", status.version(), ", epoch ", status.epoch())}};
      LRMOE_ASSIGN_OR_RETURN(TraceWriter created, TraceWriter::Create(out, header));
      writer.emplace(std::move(created));
    }
    LRMOE_RETURN_IF_ERROR(writer->Write(line));
    ++result.num_written;
  }
  if (!writer.has_value())
    return absl::NotFoundError("the controller remembers no plan of what was asked for");
  out.flush();
  return out.good() ? absl::OkStatus() : absl::DataLossError("cannot write the trace");
}

}  // namespace

absl::Status ExportTrace(const Options& options, const Console& console) {
  AdminClient client = Connect(options);
  Export result;
  if (options.file == "-") {
    LRMOE_RETURN_IF_ERROR(WriteTrace(client, options, console.out, result));
  } else {
    std::ofstream file(options.file, std::ios::binary);
    if (!file) return absl::NotFoundError(absl::StrCat("cannot open ", options.file, " for writing"));
    LRMOE_RETURN_IF_ERROR(WriteTrace(client, options, file, result));
  }
  std::ostream& told = options.file == "-" ? console.err : console.out;
  if (options.output == "json" && options.file != "-") {
    told << Dump({{"file", options.file},
                  {"invocations", result.num_written},
                  {"without_plan", result.num_failed},
                  {"no_longer_kept", result.num_gone}});
    return absl::OkStatus();
  }
  told << "exported " << result.num_written << " invocations";
  if (result.num_failed > 0) told << "; " << result.num_failed << " had no plan";
  if (result.num_gone > 0) told << "; " << result.num_gone << " were dropped from the history meanwhile";
  told << "\n";
  return absl::OkStatus();
}

}  // namespace lrmoe::ctl
