#include "controller/store/plan_database.h"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/directory.h"
#include "common/status_macros.h"
#include "controller/store/stored_form.h"

namespace lrmoe::store {
namespace {

constexpr int32_t kApplication = 0x4c724d6f;  // "LrMo", the file's application_id

constexpr const char* kSchemaText = R"(
CREATE TABLE controller(  -- one row
  running INTEGER NOT NULL,  -- 1: it has not ended in order
  made INTEGER NOT NULL, infeasible INTEGER NOT NULL,  -- plans, ever
  epoch INTEGER NOT NULL, epoch_state INTEGER NOT NULL, epoch_reason TEXT NOT NULL, model BLOB);
INSERT INTO controller VALUES(0, 0, 0, 0, 0, '', NULL);
CREATE TABLE ranks(rank INTEGER PRIMARY KEY, hello BLOB NOT NULL);  -- of that epoch
CREATE TABLE policy(field TEXT PRIMARY KEY, configured TEXT NOT NULL, value TEXT NOT NULL);
CREATE TABLE plans(
  number INTEGER PRIMARY KEY, epoch INTEGER NOT NULL,
  step INTEGER NOT NULL, layer INTEGER NOT NULL, micro_batch INTEGER NOT NULL,
  planned_at_ms INTEGER NOT NULL, routed_rows INTEGER NOT NULL,
  error TEXT NOT NULL,  -- not empty: no plan was made
  plan BLOB);
CREATE TABLE reports(number INTEGER, rank INTEGER, report BLOB NOT NULL, PRIMARY KEY(number, rank)) WITHOUT ROWID;
)";

absl::Status Cannot(const std::string& path, const absl::Status& why) {
  return absl::UnavailableError(absl::StrCat(path, " cannot be used: ", why.message()));
}

absl::Status Damaged(const std::string& path, absl::string_view why) {
  return absl::DataLossError(
      absl::StrCat(path, " is damaged (", why,
                   "); it was left as it is. To start without history, move it away together with ", path,
                   "-wal; or put copies of both in their places"));
}

// Of an error while reading: damage says what to do about it.
absl::Status Explain(const std::string& path, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::IsDataLoss(status) ? Damaged(path, status.message()) : Cannot(path, status);
}

absl::Status CallFailed(absl::string_view what) {
  return absl::UnavailableError(absl::StrCat(what, ": ", std::strerror(errno)));
}

// From the file's first bytes, before SQLite may touch it: whether it is one of ours that this version can
// read.
absl::Status CheckHeader(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::array<char, 100> header{};
  file.read(header.data(), header.size());
  if (file.bad() || !file.is_open()) return Cannot(path, CallFailed("open"));
  const auto number = [&](size_t at) {
    uint32_t value = 0;
    for (size_t i = 0; i < 4; ++i) value = value << 8 | static_cast<uint8_t>(header[at + i]);
    return value;
  };
  constexpr absl::string_view kMagic("SQLite format 3", 16);  // with its zero
  const bool whole = file.gcount() == static_cast<std::streamsize>(header.size());
  if (!whole || absl::string_view(header.data(), kMagic.size()) != kMagic || number(68) != kApplication)
    return absl::FailedPreconditionError(
        absl::StrCat(path,
                     " is no database of lrmoe-controller; it was left as it is. Allowed for state_dir: an "
                     "empty directory, or one that a controller made"));
  if (number(60) > static_cast<uint32_t>(PlanDatabase::kSchema))
    return absl::FailedPreconditionError(absl::StrCat(
        path, " has format ", number(60), "; this version reads formats up to ", PlanDatabase::kSchema,
        ". It was left as it is: start the newer lrmoe-controller, or name another state_dir"));
  if (number(60) < 1) return Damaged(path, "it has no format number");
  return absl::OkStatus();
}

bool Exists(const std::string& path) {
  struct stat found;
  return lstat(path.c_str(), &found) == 0;
}

}  // namespace

// Made under another name: a controller that dies meanwhile leaves nothing that looks like a database.
absl::Status PlanDatabase::Create(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/", kFile), partial = path + ".new";
  unlink(partial.c_str());
  unlink((partial + "-journal").c_str());
  LRMOE_ASSIGN_OR_RETURN(Database database,
                         Database::Open(partial, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE));
  LRMOE_RETURN_IF_ERROR(
      database.Execute(absl::StrCat("BEGIN;", kSchemaText, "PRAGMA application_id = ", kApplication,
                                    ";PRAGMA user_version = ", kSchema, ";COMMIT;")));
  database.Close();
  if (std::rename(partial.c_str(), path.c_str()) != 0) return CallFailed("rename");
  return SyncDirectory(directory);
}

absl::StatusOr<PlanDatabase> PlanDatabase::Open(const std::string& directory) {
  const std::string path = absl::StrCat(directory, "/", kFile);
  if (!Exists(path)) {
    // SQLite would take it for the new file's log.
    if (Exists(path + "-wal"))
      return Damaged(path, absl::StrCat("there is only ", path, "-wal, a part of it"));
    if (const absl::Status made = Create(directory); !made.ok()) return Cannot(path, made);
  }
  LRMOE_RETURN_IF_ERROR(CheckHeader(path));
  absl::StatusOr<Database> opened = Database::Open(path, SQLITE_OPEN_READWRITE);
  if (!opened.ok()) return Cannot(path, opened.status());
  PlanDatabase database(path, *std::move(opened));
  LRMOE_RETURN_IF_ERROR(Explain(path, database.Check()));
  LRMOE_RETURN_IF_ERROR(Explain(path, database.PrepareAll()));
  return database;
}

absl::Status PlanDatabase::Check() {
  database_.CheckpointOnClose(false);
  // Alone on the file, so that the log's index is in memory: it works on network file systems too. A commit
  // is safe from the death of the process at once, from that of the machine after the next checkpoint.
  LRMOE_RETURN_IF_ERROR(database_.Execute(
      "PRAGMA locking_mode = EXCLUSIVE; PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL"));
  LRMOE_ASSIGN_OR_RETURN(Statement check, database_.Prepare("PRAGMA quick_check(1)"));
  LRMOE_ASSIGN_OR_RETURN(const bool row, check.Step());
  if (!row || check.Bytes(0) != "ok")
    return absl::DataLossError(row ? check.Bytes(0) : "it cannot be checked");
  return absl::OkStatus();
}

absl::Status PlanDatabase::PrepareAll() {
  const auto prepare = [this](std::optional<Statement>& statement, absl::string_view sql) {
    absl::StatusOr<Statement> prepared = database_.Prepare(sql);
    if (!prepared.ok()) return prepared.status();
    statement.emplace(*std::move(prepared));
    return absl::OkStatus();
  };
  LRMOE_RETURN_IF_ERROR(
      prepare(add_plan_, "INSERT OR REPLACE INTO plans VALUES(?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9)"));
  LRMOE_RETURN_IF_ERROR(prepare(add_report_,
                                "INSERT OR REPLACE INTO reports SELECT ?1, ?2, ?3 "
                                "WHERE EXISTS(SELECT 1 FROM plans WHERE number = ?1)"));
  LRMOE_RETURN_IF_ERROR(prepare(drop_plans_, "DELETE FROM plans WHERE number < ?1"));
  LRMOE_RETURN_IF_ERROR(prepare(drop_reports_, "DELETE FROM reports WHERE number < ?1"));
  LRMOE_RETURN_IF_ERROR(prepare(set_counts_, "UPDATE controller SET made = ?1, infeasible = ?2"));
  return prepare(set_policy_,
                 "INSERT INTO policy VALUES(?1, ?2, ?2) ON CONFLICT(field) DO UPDATE SET value = ?2");
}

absl::StatusOr<std::vector<SavedField>> PlanDatabase::ReadPolicy() {
  const auto read = [this]() -> absl::StatusOr<std::vector<SavedField>> {
    LRMOE_ASSIGN_OR_RETURN(Statement select,
                           database_.Prepare("SELECT field, configured, value FROM policy"));
    std::vector<SavedField> fields;
    while (true) {
      LRMOE_ASSIGN_OR_RETURN(const bool row, select.Step());
      if (!row) return fields;
      fields.push_back(
          {std::string(select.Bytes(0)), std::string(select.Bytes(1)), std::string(select.Bytes(2))});
    }
  };
  absl::StatusOr<std::vector<SavedField>> fields = read();
  if (!fields.ok()) return Explain(path_, fields.status());
  return fields;
}

absl::StatusOr<bool> PlanDatabase::CutShort() {
  const auto read = [this]() -> absl::StatusOr<bool> {
    LRMOE_ASSIGN_OR_RETURN(Statement select, database_.Prepare("SELECT running FROM controller"));
    LRMOE_ASSIGN_OR_RETURN(const bool row, select.Step());
    if (!row) return absl::DataLossError("the table controller is empty");
    return select.Int(0) != 0;
  };
  absl::StatusOr<bool> running = read();
  if (!running.ok()) return Explain(path_, running.status());
  return running;
}

absl::StatusOr<core::EpochRecord> PlanDatabase::ReadEpoch() {
  const auto read = [this]() -> absl::StatusOr<core::EpochRecord> {
    LRMOE_ASSIGN_OR_RETURN(
        Statement select,
        database_.Prepare("SELECT epoch, epoch_state, epoch_reason, model FROM controller"));
    LRMOE_ASSIGN_OR_RETURN(const bool row, select.Step());
    if (!row) return absl::DataLossError("the table controller is empty");
    const int64_t state = select.Int(1);
    if (state < 0 || state > static_cast<int64_t>(core::EpochState::kAborted))
      return absl::DataLossError(absl::StrCat("epoch_state is ", state));
    core::EpochRecord epoch{.epoch = Epoch{static_cast<uint64_t>(select.Int(0))},
                            .state = static_cast<core::EpochState>(state),
                            .reason = std::string(select.Bytes(2))};
    if (!select.Null(3)) {
      LRMOE_ASSIGN_OR_RETURN(epoch.model, ModelOf(select.Bytes(3)));
    }
    LRMOE_ASSIGN_OR_RETURN(Statement ranks, database_.Prepare("SELECT hello FROM ranks ORDER BY rank"));
    while (true) {
      LRMOE_ASSIGN_OR_RETURN(const bool rank, ranks.Step());
      if (!rank) return epoch;
      LRMOE_ASSIGN_OR_RETURN(Hello hello, HelloOf(ranks.Bytes(0)));
      epoch.hellos.push_back(std::move(hello));
    }
  };
  absl::StatusOr<core::EpochRecord> epoch = read();
  if (!epoch.ok()) return Explain(path_, epoch.status());
  return epoch;
}

absl::Status PlanDatabase::Load(core::History* history) {
  return Explain(path_, LoadAll(history));
}

absl::Status PlanDatabase::LoadAll(core::History* history) {
  LRMOE_ASSIGN_OR_RETURN(Statement counts, database_.Prepare("SELECT made, infeasible FROM controller"));
  LRMOE_ASSIGN_OR_RETURN(const bool counted, counts.Step());
  if (!counted) return absl::DataLossError("the table controller is empty");
  history->RestoreTally(counts.Int(0), counts.Int(1));
  LRMOE_ASSIGN_OR_RETURN(Statement plans,
                         database_.Prepare("SELECT number, epoch, step, layer, micro_batch, planned_at_ms, "
                                           "routed_rows, error, plan FROM plans ORDER BY number"));
  LRMOE_ASSIGN_OR_RETURN(
      Statement reports,
      database_.Prepare("SELECT rank, report FROM reports WHERE number = ?1 ORDER BY rank"));
  while (true) {
    LRMOE_ASSIGN_OR_RETURN(const bool row, plans.Step());
    if (!row) return absl::OkStatus();
    if (plans.Int(0) < 1) return absl::DataLossError("a plan's number is below 1");
    core::PlanRecord record{.number = static_cast<uint64_t>(plans.Int(0)),
                            .epoch = Epoch{static_cast<uint64_t>(plans.Int(1))},
                            .error = std::string(plans.Bytes(7)),
                            .routed_rows = plans.Int(6),
                            .planned_at_ms = plans.Int(5)};
    ExecutionPlan plan;
    if (record.error.empty()) {
      LRMOE_ASSIGN_OR_RETURN(plan, PlanOf(plans.Bytes(8)));
    } else {
      plan.plan.feasible = false;
      plan.plan.invocation = {plans.Int(2), static_cast<int32_t>(plans.Int(3)),
                              static_cast<int32_t>(plans.Int(4))};
    }
    record.plan = std::make_shared<const ExecutionPlan>(std::move(plan));
    LRMOE_RETURN_IF_ERROR(reports.Bind(record.number));
    while (true) {
      LRMOE_ASSIGN_OR_RETURN(const bool reported, reports.Step());
      if (!reported) break;
      LRMOE_ASSIGN_OR_RETURN(record.reports[static_cast<int32_t>(reports.Int(0))],
                             ReportOf(reports.Bytes(1)));
    }
    history->Restore(std::move(record));
  }
}

absl::Status PlanDatabase::Begin(const Policy& configured, const Policy& chosen) {
  const auto write = [&]() -> absl::Status {
    LRMOE_RETURN_IF_ERROR(database_.Execute("BEGIN; UPDATE controller SET running = 1; DELETE FROM policy"));
    LRMOE_ASSIGN_OR_RETURN(Statement insert, database_.Prepare("INSERT INTO policy VALUES(?1, ?2, ?3)"));
    const auto values = PolicyFields(chosen);
    size_t position = 0;
    for (const auto& [name, setting] : PolicyFields(configured))
      LRMOE_RETURN_IF_ERROR(insert.Run(name, setting, values[position++].second));
    return database_.Execute("COMMIT");
  };
  const absl::Status written = write();
  if (!written.ok()) {
    database_.Rollback();
    return Cannot(path_, written);
  }
  database_.CheckpointOnClose(true);
  return absl::OkStatus();
}

absl::StatusOr<int64_t> PlanDatabase::Write(const Batch& batch) {
  absl::StatusOr<int64_t> orphans = WriteAll(batch);
  if (!orphans.ok()) database_.Rollback();
  return orphans;
}

absl::StatusOr<int64_t> PlanDatabase::WriteAll(const Batch& batch) {
  LRMOE_RETURN_IF_ERROR(database_.Execute("BEGIN"));
  for (const core::PlanRecord& record : batch.plans) {
    const Invocation& invocation = record.plan->plan.invocation;
    const auto add = [&](const auto& plan) {
      return add_plan_->Run(record.number, static_cast<uint64_t>(record.epoch), invocation.step,
                            invocation.layer, invocation.micro_batch, record.planned_at_ms,
                            record.routed_rows, record.error, plan);
    };
    LRMOE_RETURN_IF_ERROR(record.error.empty() ? add(Blob{ToBytes(*record.plan)}) : add(nullptr));
  }
  int64_t orphans = 0;
  for (const Batch::Report& report : batch.reports) {
    LRMOE_RETURN_IF_ERROR(add_report_->Run(report.number, report.rank_idx, Blob{ToBytes(report.report)}));
    orphans += database_.changes() == 0;
  }
  if (!batch.plans.empty()) LRMOE_RETURN_IF_ERROR(set_counts_->Run(batch.made, batch.infeasible));
  LRMOE_RETURN_IF_ERROR(drop_plans_->Run(batch.oldest_number));
  LRMOE_RETURN_IF_ERROR(drop_reports_->Run(batch.oldest_number));
  if (batch.policy.has_value())
    for (const auto& [name, value] : PolicyFields(*batch.policy))
      LRMOE_RETURN_IF_ERROR(set_policy_->Run(name, value));
  if (batch.epoch.has_value()) LRMOE_RETURN_IF_ERROR(WriteEpoch(*batch.epoch));
  LRMOE_RETURN_IF_ERROR(database_.Execute("COMMIT"));
  return orphans;
}

absl::Status PlanDatabase::WriteEpoch(const core::EpochRecord& epoch) {
  LRMOE_ASSIGN_OR_RETURN(Statement update,
                         database_.Prepare("UPDATE controller SET epoch = ?1, epoch_state = ?2, "
                                           "epoch_reason = ?3, model = ?4"));
  const auto number = static_cast<uint64_t>(epoch.epoch);
  const auto state = static_cast<int32_t>(epoch.state);
  LRMOE_RETURN_IF_ERROR(epoch.model.has_value()
                            ? update.Run(number, state, epoch.reason, Blob{ToBytes(*epoch.model)})
                            : update.Run(number, state, epoch.reason, nullptr));
  LRMOE_RETURN_IF_ERROR(database_.Execute("DELETE FROM ranks"));
  LRMOE_ASSIGN_OR_RETURN(Statement insert, database_.Prepare("INSERT INTO ranks VALUES(?1, ?2)"));
  for (const Hello& hello : epoch.hellos)
    LRMOE_RETURN_IF_ERROR(insert.Run(hello.rank_idx, Blob{ToBytes(hello)}));
  return absl::OkStatus();
}

absl::Status PlanDatabase::End() {
  return database_.Execute("UPDATE controller SET running = 0");
}

}  // namespace lrmoe::store
