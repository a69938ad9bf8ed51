#include "controller/store/sqlite.h"

#include <cerrno>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace lrmoe::store {

absl::Status ErrorOf(sqlite3* database) {
  std::string text = sqlite3_errmsg(database);
  const int code = sqlite3_errcode(database);  // not the extended one
  if (code == SQLITE_CORRUPT || code == SQLITE_NOTADB) return absl::DataLossError(text);
  if (code == SQLITE_BUSY || code == SQLITE_LOCKED) return absl::FailedPreconditionError(text);
  // SQLite does not say why a commit failed; the last system call that failed in it does.
  const int error = sqlite3_system_errno(database) != 0 ? sqlite3_system_errno(database) : errno;
  if ((code == SQLITE_IOERR || code == SQLITE_CANTOPEN) && error != 0)
    absl::StrAppend(&text, " (", std::strerror(error), ")");
  return absl::UnavailableError(text);
}

absl::StatusOr<bool> Statement::Step() {
  errno = 0;
  const int code = sqlite3_step(statement_.get());
  if (code == SQLITE_ROW) return true;
  if (code == SQLITE_DONE) return false;
  const absl::Status status = ErrorOf(sqlite3_db_handle(statement_.get()));
  sqlite3_reset(statement_.get());
  return status;
}

absl::string_view Statement::Bytes(int column) const {
  const void* bytes = sqlite3_column_blob(statement_.get(), column);
  const int size = sqlite3_column_bytes(statement_.get(), column);
  return {static_cast<const char*>(bytes), static_cast<size_t>(size)};
}

// An empty view may have no address, which SQLite would take for NULL.
int Statement::BindOne(int position, absl::string_view text) {
  return sqlite3_bind_text64(statement_.get(), position, text.empty() ? "" : text.data(), text.size(),
                             SQLITE_STATIC, SQLITE_UTF8);
}

int Statement::BindOne(int position, Blob blob) {
  return sqlite3_bind_blob64(statement_.get(), position, blob.bytes.empty() ? "" : blob.bytes.data(),
                             blob.bytes.size(), SQLITE_STATIC);
}

absl::StatusOr<Database> Database::Open(const std::string& path, int flags) {
  sqlite3* opened = nullptr;
  const int code = sqlite3_open_v2(path.c_str(), &opened, flags | SQLITE_OPEN_NOMUTEX, nullptr);
  Database database(opened);
  if (code != SQLITE_OK) return ErrorOf(opened);
  return database;
}

absl::Status Database::Execute(const std::string& sql) {
  errno = 0;
  if (sqlite3_exec(database_.get(), sql.c_str(), nullptr, nullptr, nullptr) == SQLITE_OK)
    return absl::OkStatus();
  return ErrorOf(database_.get());
}

absl::StatusOr<Statement> Database::Prepare(absl::string_view sql) {
  sqlite3_stmt* statement = nullptr;
  const int code = sqlite3_prepare_v3(database_.get(), sql.data(), static_cast<int>(sql.size()),
                                      SQLITE_PREPARE_PERSISTENT, &statement, nullptr);
  if (code != SQLITE_OK) return ErrorOf(database_.get());
  return Statement(statement);
}

void Database::Rollback() {
  // After some errors SQLite has done it already.
  if (sqlite3_get_autocommit(database_.get()) == 0)
    sqlite3_exec(database_.get(), "ROLLBACK", nullptr, nullptr, nullptr);
}

void Database::CheckpointOnClose(bool may) {
  sqlite3_db_config(database_.get(), SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, may ? 0 : 1, nullptr);
}

}  // namespace lrmoe::store
