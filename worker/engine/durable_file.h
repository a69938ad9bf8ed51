// Files that are either wholly on disk or reported as failed. Every error names the file and what the system
// said: ResourceExhausted (no space), PermissionDenied, NotFound, DataLoss (shorter than asked for), Internal
// (the rest).
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace lrmoe::engine {

// CRC-32 as zlib and Ethernet have it. Continues from `crc`; 0 begins.
uint32_t Crc32(uint32_t crc, std::span<const std::byte> bytes);

struct FileSum {
  int64_t bytes = 0;
  uint32_t crc32 = 0;
  bool operator==(const FileSum&) const = default;
};

// Writes one file from beginning to end. One thread.
class FileWriter {
 public:
  // Creates the file, or empties it.
  static absl::StatusOr<FileWriter> Create(const std::string& path);
  FileWriter(FileWriter&& other) noexcept;
  FileWriter& operator=(FileWriter&&) = delete;
  ~FileWriter();  // closes; what was not finished may be lost

  absl::Status Write(std::span<const std::byte> bytes);
  // Waits until the disk has it. The file's name is durable only after SyncDirectory.
  absl::StatusOr<FileSum> Finish();

 private:
  FileWriter(std::string path, int fd) : path_(std::move(path)), fd_(fd) {}
  std::string path_;
  int fd_;
  FileSum sum_;
};

// Reads one file at any place. Const methods may be called by several threads.
class FileReader {
 public:
  static absl::StatusOr<FileReader> Open(
      const std::string& path);  // FailedPrecondition when it is no regular file
  FileReader(FileReader&& other) noexcept;
  FileReader& operator=(FileReader&&) = delete;
  ~FileReader();

  const std::string& path() const { return path_; }
  int64_t bytes() const { return bytes_; }
  absl::Status Read(int64_t offset, std::span<std::byte> to) const;
  absl::StatusOr<FileSum> Sum() const;  // reads all of it

 private:
  FileReader(std::string path, int fd, int64_t bytes) : path_(std::move(path)), fd_(fd), bytes_(bytes) {}
  std::string path_;
  int fd_;
  int64_t bytes_;
};

// Whole small files. Reading more than max_bytes is DataLoss.
absl::Status WriteWhole(const std::string& path, absl::string_view text);
absl::StatusOr<std::string> ReadWhole(const std::string& path, int64_t max_bytes);

// Puts directory `from` in the place of `to` in one step; what was there lies at `from` afterwards.
// FailedPrecondition when `to` exists and the file system cannot exchange names.
absl::Status ReplaceDirectory(const std::string& from, const std::string& to);

}  // namespace lrmoe::engine
