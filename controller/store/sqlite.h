// SQLite's C API with owners and statuses. Errors name what SQLite and, where it knows, the system say, but
// not the file. One thread at a time per database and its statements.
#pragma once

#include <sqlite3.h>

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/status_macros.h"

namespace lrmoe::store {

// DataLoss: damaged, or no database. FailedPrecondition: locked by another process. Unavailable: all else.
absl::Status ErrorOf(sqlite3* database);

// Bytes, not text.
struct Blob {
  absl::string_view bytes;
};

class Statement {
 public:
  // Binds the arguments to ?1, ?2, ... and leaves the statement before its first row. What is bound must live
  // until the next Bind.
  template <typename... Values>
  absl::Status Bind(const Values&... values) {
    sqlite3_reset(statement_.get());
    [[maybe_unused]] int position = 0;
    if ((... && (BindOne(++position, values) == SQLITE_OK))) return absl::OkStatus();
    return ErrorOf(sqlite3_db_handle(statement_.get()));
  }
  absl::StatusOr<bool> Step();  // true: there is a row
  // Binds, and runs to the end.
  template <typename... Values>
  absl::Status Run(const Values&... values) {
    LRMOE_RETURN_IF_ERROR(Bind(values...));
    absl::StatusOr<bool> row = true;
    while (row.ok() && *row) row = Step();
    sqlite3_reset(statement_.get());
    return row.status();
  }

  // Of the row in hand, columns from 0; texts live until the next Step or Bind.
  int64_t Int(int column) const { return sqlite3_column_int64(statement_.get(), column); }
  bool Null(int column) const { return sqlite3_column_type(statement_.get(), column) == SQLITE_NULL; }
  absl::string_view Bytes(int column) const;  // of a text as well

 private:
  friend class Database;
  struct Finalizer {
    void operator()(sqlite3_stmt* statement) const { sqlite3_finalize(statement); }
  };
  explicit Statement(sqlite3_stmt* statement) : statement_(statement) {}
  int BindOne(int position, int64_t value) { return sqlite3_bind_int64(statement_.get(), position, value); }
  int BindOne(int position, int32_t value) { return BindOne(position, int64_t{value}); }
  int BindOne(int position, uint64_t value) { return BindOne(position, static_cast<int64_t>(value)); }
  int BindOne(int position, absl::string_view text);
  int BindOne(int position, const std::string& text) { return BindOne(position, absl::string_view(text)); }
  int BindOne(int position, Blob blob);
  int BindOne(int position, std::nullptr_t) { return sqlite3_bind_null(statement_.get(), position); }

  std::unique_ptr<sqlite3_stmt, Finalizer> statement_;
};

class Database {
 public:
  // `flags` are SQLITE_OPEN_*.
  static absl::StatusOr<Database> Open(const std::string& path, int flags);

  absl::Status Execute(const std::string& sql);  // one or more statements without arguments; rows are dropped
  absl::StatusOr<Statement> Prepare(absl::string_view sql);
  int64_t changes() const { return sqlite3_changes(database_.get()); }  // rows of the last statement
  // Undoes the transaction, if one is open.
  void Rollback();
  // Whether closing may move the log into the file: not before it is known to be sound.
  void CheckpointOnClose(bool may);
  // The statements must be gone.
  void Close() { database_.reset(); }

 private:
  struct Closer {
    void operator()(sqlite3* database) const { sqlite3_close_v2(database); }
  };
  explicit Database(sqlite3* database) : database_(database) {}
  std::unique_ptr<sqlite3, Closer> database_;
};

}  // namespace lrmoe::store
