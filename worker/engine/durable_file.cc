#include "worker/engine/durable_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <zlib.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/check.h"
#include "common/directory.h"
#include "common/status_macros.h"

namespace lrmoe::engine {
namespace {

constexpr size_t kPieceBytes = 4 << 20;  // per system call; bounds the buffer of Sum

}  // namespace

uint32_t Crc32(uint32_t crc, std::span<const std::byte> bytes) {
  return static_cast<uint32_t>(crc32_z(crc, reinterpret_cast<const Bytef*>(bytes.data()), bytes.size()));
}

absl::StatusOr<FileWriter> FileWriter::Create(const std::string& path) {
  const int fd = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644);
  if (fd < 0) return SystemError("create", path, errno);
  return FileWriter(path, fd);
}

FileWriter::FileWriter(FileWriter&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), sum_(other.sum_) {}

FileWriter::~FileWriter() {
  if (fd_ >= 0) close(fd_);
}

absl::Status FileWriter::Write(std::span<const std::byte> bytes) {
  LRMOE_CHECK_GE(fd_, 0);
  while (!bytes.empty()) {
    const ssize_t written = write(fd_, bytes.data(), std::min(bytes.size(), kPieceBytes));
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) return SystemError("write", path_, errno);
    sum_.crc32 = Crc32(sum_.crc32, bytes.first(written));
    sum_.bytes += written;
    bytes = bytes.subspan(written);
  }
  return absl::OkStatus();
}

absl::StatusOr<FileSum> FileWriter::Finish() {
  LRMOE_CHECK_GE(fd_, 0);
  if (fsync(fd_) != 0) return SystemError("fsync", path_, errno);
  if (close(std::exchange(fd_, -1)) != 0) return SystemError("close", path_, errno);
  return sum_;
}

absl::StatusOr<FileReader> FileReader::Open(const std::string& path) {
  // Without O_NONBLOCK, opening a pipe that somebody put there would wait for its writer.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return SystemError("open", path, errno);
  FileReader reader(path, fd, 0);
  struct stat info;
  if (fstat(fd, &info) != 0) return SystemError("stat", path, errno);
  if (!S_ISREG(info.st_mode))
    return absl::FailedPreconditionError(absl::StrCat(path, ": not a regular file"));
  reader.bytes_ = info.st_size;
  return reader;
}

FileReader::FileReader(FileReader&& other) noexcept
    : path_(std::move(other.path_)), fd_(std::exchange(other.fd_, -1)), bytes_(other.bytes_) {}

FileReader::~FileReader() {
  if (fd_ >= 0) close(fd_);
}

absl::Status FileReader::Read(int64_t offset, std::span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t got = pread(fd_, to.data(), std::min(to.size(), kPieceBytes), offset);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return SystemError("read", path_, errno);
    if (got == 0)
      return absl::DataLossError(absl::StrCat(path_, ": ends at byte ", offset, ", more was expected"));
    offset += got;
    to = to.subspan(got);
  }
  return absl::OkStatus();
}

absl::StatusOr<FileSum> FileReader::Sum() const {
  std::vector<std::byte> piece(std::min<int64_t>(bytes_, kPieceBytes));
  FileSum sum;
  while (sum.bytes < bytes_) {
    const std::span<std::byte> part =
        std::span(piece).first(std::min<int64_t>(bytes_ - sum.bytes, piece.size()));
    LRMOE_RETURN_IF_ERROR(Read(sum.bytes, part));
    sum.crc32 = Crc32(sum.crc32, part);
    sum.bytes += static_cast<int64_t>(part.size());
  }
  return sum;
}

absl::Status WriteWhole(const std::string& path, absl::string_view text) {
  LRMOE_ASSIGN_OR_RETURN(FileWriter writer, FileWriter::Create(path));
  LRMOE_RETURN_IF_ERROR(writer.Write(std::as_bytes(std::span(text.data(), text.size()))));
  return writer.Finish().status();
}

absl::StatusOr<std::string> ReadWhole(const std::string& path, int64_t max_bytes) {
  LRMOE_ASSIGN_OR_RETURN(const FileReader reader, FileReader::Open(path));
  if (reader.bytes() > max_bytes) {
    return absl::DataLossError(
        absl::StrCat(path, ": has ", reader.bytes(), " bytes; allowed: 0..", max_bytes));
  }
  std::string text(reader.bytes(), '\0');
  LRMOE_RETURN_IF_ERROR(reader.Read(0, std::as_writable_bytes(std::span(text.data(), text.size()))));
  return text;
}

absl::Status ReplaceDirectory(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  if (errno != ENOTEMPTY && errno != EEXIST) return SystemError("rename", from, errno);
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) return absl::OkStatus();
  if (errno == EINVAL || errno == ENOSYS) {
    return absl::FailedPreconditionError(
        absl::StrCat(to, ": exists, and this file system cannot exchange directories; remove it first"));
  }
  return SystemError("exchange directories", to, errno);
}

}  // namespace lrmoe::engine
