// The safetensors file format: 8 bytes little-endian length of the header, a JSON header (name -> dtype,
// shape, [begin, end) in what follows; "__metadata__" of strings), then the tensors without gaps.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/engine/durable_file.h"

namespace lrmoe::engine {

// A tensor to be written. `bytes` gives its values, row-major, little-endian, exactly as many as the shape
// says; they stay valid until another tensor's are asked for.
struct TensorToWrite {
  std::string name;
  absl::string_view dtype;  // "BF16" or "F32"
  std::vector<int64_t> shape;
  std::function<absl::StatusOr<std::span<const std::byte>>()> bytes;
};

// In the order given, in which values are asked for once each; data begins at a multiple of 8. Synced. Names
// must be distinct. Errors of FileWriter and of `bytes`.
absl::StatusOr<FileSum> WriteSafetensors(const std::string& path, std::span<const TensorToWrite> tensors,
                                         const std::map<std::string, std::string>& metadata);

struct StoredTensor {
  std::string dtype;
  std::vector<int64_t> shape;
  int64_t offset = 0;  // from the start of the file
  int64_t bytes = 0;
};

// An open file whose header is valid: known dtypes, sizes that match shapes, tensors that cover the rest of
// the file without gap or overlap, distinct names.
class SafetensorsFile {
 public:
  // DataLoss naming file and reason when the header is not valid; errors of FileReader.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);

  const FileReader& file() const { return file_; }
  const std::map<std::string, StoredTensor>& tensors() const { return tensors_; }
  // DataLoss unless the tensor is there with this dtype and shape.
  absl::Status Check(const std::string& name, absl::string_view dtype,
                     const std::vector<int64_t>& shape) const;
  // A tensor that Check found; `to` has its size.
  absl::Status Read(const std::string& name, std::span<std::byte> to) const;

 private:
  explicit SafetensorsFile(FileReader file) : file_(std::move(file)) {}
  FileReader file_;
  std::map<std::string, StoredTensor> tensors_;
};

}  // namespace lrmoe::engine
