// A file that lives as long as its object.
#pragma once

#include <stdlib.h>
#include <unistd.h>

#include <cstdio>
#include <fstream>
#include <string>

namespace lrmoe::test {

class TemporaryFile {
 public:
  explicit TemporaryFile(const std::string& text, const std::string& suffix = "") {
    const char* folder = getenv("TMPDIR");
    path_ = std::string(folder != nullptr ? folder : "/tmp") + "/lrmoe-test-XXXXXX" + suffix;
    const int file = mkstemps(path_.data(), static_cast<int>(suffix.size()));
    if (file >= 0) close(file);
    std::ofstream(path_, std::ios::binary) << text;
  }
  ~TemporaryFile() { std::remove(path_.c_str()); }
  TemporaryFile(const TemporaryFile&) = delete;
  TemporaryFile& operator=(const TemporaryFile&) = delete;
  const std::string& path() const { return path_; }

 private:
  std::string path_;
};

}  // namespace lrmoe::test
