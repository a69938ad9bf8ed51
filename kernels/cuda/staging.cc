#include "kernels/cuda/staging.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace lrmoe::kernels::cuda {
namespace {

constexpr int64_t kAlignment = 256;
constexpr int64_t kChunkBytes = int64_t{8} << 20;  // the descriptions of some 200,000 stretches

int64_t RoundUp(int64_t value, int64_t step) {
  return (value + step - 1) / step * step;
}

}  // namespace

absl::StatusOr<Staging::Piece> Staging::Take(int64_t bytes) {
  const int64_t size = RoundUp(std::max<int64_t>(bytes, 1), kAlignment);
  while (current_ < chunks_.size() && chunks_[current_].used + size > chunks_[current_].host->capacity())
    ++current_;
  if (current_ == chunks_.size()) {
    const int64_t capacity = RoundUp(size, kChunkBytes);
    Chunk chunk;
    absl::StatusOr<std::unique_ptr<Memory>> host = runtime_->AllocatePinned(capacity);
    if (!host.ok()) return host.status();
    absl::StatusOr<std::unique_ptr<Memory>> device = runtime_->Reserve(capacity);
    if (!device.ok()) return device.status();
    if (absl::Status status = (*device)->Commit(capacity); !status.ok()) return status;
    chunk.host = *std::move(host);
    chunk.device = *std::move(device);
    chunks_.push_back(std::move(chunk));
  }
  Chunk& chunk = chunks_[current_];
  const Piece piece{chunk.host->base() + chunk.used, chunk.device->base() + chunk.used};
  chunk.used += size;
  in_use_ += size;
  return piece;
}

absl::StatusOr<const void*> Staging::In(const void* src, int64_t bytes) {
  absl::StatusOr<Piece> piece = Take(bytes);
  if (!piece.ok()) return piece.status();
  if (bytes > 0) {
    std::memcpy(piece->host, src, bytes);
    absl::Status status = runtime_->Copy(piece->device, piece->host, bytes, Direction::kToDevice);
    if (!status.ok()) return status;
  }
  return piece->device;
}

absl::StatusOr<void*> Staging::Scratch(int64_t bytes) {
  absl::StatusOr<Piece> piece = Take(bytes);
  if (!piece.ok()) return piece.status();
  return piece->device;
}

absl::Status Staging::Out(void* dst, const void* device, int64_t bytes) {
  if (bytes == 0) return absl::OkStatus();
  const auto* at = static_cast<const std::byte*>(device);
  const auto chunk = std::find_if(chunks_.begin(), chunks_.end(), [at](const Chunk& c) {
    return at >= c.device->base() && at < c.device->base() + c.device->capacity();
  });
  if (chunk == chunks_.end()) return absl::InternalError("staged output from foreign memory");
  std::byte* const host = chunk->host->base() + (at - chunk->device->base());
  deliveries_.push_back({dst, host, bytes});
  return runtime_->Copy(host, device, bytes, Direction::kToHost);
}

void Staging::Finish() {
  for (const Delivery& delivery : deliveries_) std::memcpy(delivery.dst, delivery.host, delivery.bytes);
  deliveries_.clear();
  for (Chunk& chunk : chunks_) chunk.used = 0;
  current_ = 0;
  in_use_ = 0;
}

}  // namespace lrmoe::kernels::cuda
