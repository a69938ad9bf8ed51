// The part of the CUDA device that works per pair, and what both parts enqueue their passes by: one stream,
// descriptions and results of the host staged through pinned memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "kernels/cuda/pair_passes.h"
#include "kernels/cuda/runtime.h"
#include "kernels/cuda/staging.h"
#include "kernels/kernels.h"

namespace lrmoe::kernels::cuda {

class PairDevice : public Device {
 public:
  absl::Status Wait() override;
  void Fill(void* dst, uint8_t value, int64_t bytes) override {
    if (bytes > 0 && error_.ok()) Keep(runtime_->Fill(dst, value, bytes));
  }

  void GatherWords(int64_t n, const int32_t* index, const void* src, void* dst) override;
  void ScatterWords(int64_t n, const int32_t* index, const void* src, void* dst) override;
  void Invert(int64_t n, const int32_t* index, int32_t* dst) override;
  void CopyStretches(std::span<const Stretch> stretches, const void* src, void* dst) override;
  void CountStretches(std::span<const Stretch> stretches, int32_t* dst) override;
  void CountRepeated(int64_t n, int32_t times, int32_t* dst) override;
  void MaxOfRanges(std::span<const Range> ranges, const int32_t* src, std::span<int32_t> largest) override;
  void ScorePairs(const ScoreArgs& args) override;
  void FindThresholds(const ThresholdArgs& args) override;
  void KeepPairs(const KeepArgs& args) override;
  void WeighPairs(const WeighArgs& args) override;
  void PackPayload(const PayloadArgs& args) override;
  void PackBits(std::span<const Stretch> stretches, const uint8_t* marks, uint8_t* bits) override;
  void UnpackBits(std::span<const Stretch> stretches, const uint8_t* bits, int32_t* index) override;
  void GroupByKey(int64_t n, const int32_t* keys, int64_t num_keys, int64_t* offset, int32_t* index) override;

 protected:
  explicit PairDevice(std::unique_ptr<Runtime> runtime)
      : runtime_(std::move(runtime)), staging_(runtime_.get()) {}

  Runtime& runtime() const { return *runtime_; }
  const absl::Status& error() const { return error_; }
  void Keep(absl::Status status) {
    if (error_.ok()) error_ = std::move(status);
  }
  // A pointer to other memory would end in an illegal access, which takes the whole context with it. Nothing
  // is accessed where `count` is 0, nor through null.
  void Expect(const char* operation, size_t count, std::initializer_list<const void*> pointers);
  // After an error nothing more is enqueued: pointers of failed staging would be null.
  void Do(absl::FunctionRef<absl::Status()> enqueue) {
    if (error_.ok()) Keep(runtime_->Launch(enqueue));
  }
  // Device memory for what is enqueued before Relieve.
  template <typename T>
  T* Scratch(int64_t count) {
    absl::StatusOr<void*> scratch = staging_.Scratch(count * static_cast<int64_t>(sizeof(T)));
    if (scratch.ok()) return static_cast<T*>(*scratch);
    Keep(scratch.status());
    return nullptr;
  }
  // What a pass wrote to scratch is the host's after Wait.
  template <typename T>
  void Deliver(std::span<T> dst, const T* scratch) {
    if (error_.ok()) Keep(staging_.Out(dst.data(), scratch, static_cast<int64_t>(dst.size_bytes())));
  }
  // At the end of an operation that staged anything: waits for the stream when too much is under way.
  void Relieve();

 private:
  // The elements of the host, where kernels read them.
  template <typename T>
  std::span<const T> In(std::span<const T> src);
  // The items in pieces, there as well.
  template <typename Item>
  Cut<Item> InPieces(std::span<const Item> items);

  const std::unique_ptr<Runtime> runtime_;
  Staging staging_;
  absl::Status error_;                // the first
  std::vector<int64_t> first_piece_;  // of the current call
};

}  // namespace lrmoe::kernels::cuda
