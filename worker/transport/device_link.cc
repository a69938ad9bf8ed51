#include "worker/transport/device_link.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/transport/contract.h"

namespace lrmoe::transport {
namespace {

enum class Place : int64_t { kNowhere, kHost, kDevice };

absl::string_view Name(int64_t place) {
  return place == static_cast<int64_t>(Place::kDevice) ? "device memory" : "host memory";
}

class LinkedTransport : public Transport {
 public:
  LinkedTransport(std::unique_ptr<Transport> control, std::unique_ptr<DeviceLink> link)
      : control_(std::move(control)), link_(std::move(link)) {}

  int32_t rank() const override { return control_->rank(); }
  int32_t size() const override { return control_->size(); }

  absl::Status AllToAllV(const Call& call, std::span<const std::byte> send,
                         std::span<const int64_t> send_bytes, std::span<std::byte> recv,
                         std::span<const int64_t> recv_bytes) override {
    LRMOE_RETURN_IF_ERROR(CheckAllToAllV(call, rank(), size(), send, send_bytes, recv, recv_bytes));
    const Place from = PlaceOf(send), to = PlaceOf(recv);
    if (from != to && from != Place::kNowhere && to != Place::kNowhere)
      return absl::InvalidArgumentError(absl::StrCat(Where(call, rank()), ": send lies in ",
                                                     Name(static_cast<int64_t>(from)), ", recv in ",
                                                     Name(static_cast<int64_t>(to))));
    std::vector<int64_t> mine{static_cast<int64_t>(std::max(from, to))};
    mine.insert(mine.end(), send_bytes.begin(), send_bytes.end());
    mine.insert(mine.end(), recv_bytes.begin(), recv_bytes.end());
    std::vector<int64_t> all(mine.size() * size());
    LRMOE_RETURN_IF_ERROR(
        control_->AllGather(call, std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
    if (const std::string disagreement = Disagreement(all); !disagreement.empty()) {
      const absl::Status status =
          absl::FailedPreconditionError(absl::StrCat(Where(call, rank()), ": ", disagreement));
      Abort(status.message());
      return status;
    }
    bool device = false;
    for (int32_t r = 0; r < size(); ++r) device |= PlaceIn(all, r) == static_cast<int64_t>(Place::kDevice);
    if (!device) return control_->AllToAllV(call, send, send_bytes, recv, recv_bytes);
    absl::Status status = link_->AllToAllV(call, send, send_bytes, recv, recv_bytes);
    if (!status.ok()) control_->Abort(status.message());
    return status;
  }

  absl::Status AllGather(const Call& call, std::span<const std::byte> send,
                         std::span<std::byte> recv) override {
    return control_->AllGather(call, send, recv);
  }
  absl::Status AllReduce(const Call& call, std::span<int64_t> values, Reduction reduction) override {
    return control_->AllReduce(call, values, reduction);
  }
  absl::Status AllReduce(const Call& call, std::span<double> values, Reduction reduction) override {
    return control_->AllReduce(call, values, reduction);
  }
  absl::Status Broadcast(const Call& call, int32_t root, std::span<std::byte> buffer) override {
    return control_->Broadcast(call, root, buffer);
  }
  absl::Status Barrier(const Call& call) override { return control_->Barrier(call); }

  void Abort(absl::string_view reason) override {
    control_->Abort(reason);
    link_->Abort();
  }

 private:
  Place PlaceOf(std::span<const std::byte> buffer) const {
    if (buffer.empty()) return Place::kNowhere;
    return link_->Holds(buffer.data()) ? Place::kDevice : Place::kHost;
  }
  size_t Width() const { return 1 + 2 * static_cast<size_t>(size()); }
  int64_t PlaceIn(const std::vector<int64_t>& all, int32_t r) const { return all[r * Width()]; }

  // Empty when all ranks' sizes and places fit together; otherwise the first that do not, both sides named.
  std::string Disagreement(const std::vector<int64_t>& all) const {
    for (int32_t from = 0; from < size(); ++from) {
      for (int32_t to = 0; to < size(); ++to) {
        const int64_t sent = all[from * Width() + 1 + to], expected = all[to * Width() + 1 + size() + from];
        if (sent != expected)
          return absl::StrCat("ranks disagree about AllToAllV: rank ", from, " sends ", sent,
                              " bytes to rank ", to, ", which expects ", expected);
        if (sent > 0 && PlaceIn(all, from) != PlaceIn(all, to))
          return absl::StrCat("ranks disagree about AllToAllV: rank ", from, " uses ",
                              Name(PlaceIn(all, from)), ", rank ", to, " ", Name(PlaceIn(all, to)));
      }
    }
    return "";
  }

  const std::unique_ptr<Transport> control_;
  const std::unique_ptr<DeviceLink> link_;
};

}  // namespace

std::unique_ptr<Transport> CreateLinkedTransport(std::unique_ptr<Transport> control,
                                                 std::unique_ptr<DeviceLink> link) {
  return std::make_unique<LinkedTransport>(std::move(control), std::move(link));
}

}  // namespace lrmoe::transport
