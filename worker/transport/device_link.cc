#include "worker/transport/device_link.h"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/status_macros.h"
#include "worker/transport/contract.h"
#include "worker/transport/forwarding.h"

namespace lrmoe::transport {
namespace {

enum class Place : int64_t { kNowhere, kHost, kDevice };

absl::string_view Name(int64_t place) {
  return place == static_cast<int64_t>(Place::kDevice) ? "device memory" : "host memory";
}

// Around the control transport; exchanges of rows choose their way.
class LinkedTransport : public ForwardingTransport {
 public:
  LinkedTransport(std::unique_ptr<Transport> control, std::unique_ptr<DeviceLink> link)
      : ForwardingTransport(std::move(control)), link_(std::move(link)) {}

  absl::StatusOr<Ticket> StartAllToAllV(const Call& call, SendParts send, RecvParts recv) override {
    LRMOE_RETURN_IF_ERROR(CheckStart(call, rank(), size(), send, recv, started_));
    Place from = Place::kNowhere, to = Place::kNowhere;
    LRMOE_RETURN_IF_ERROR(FindPlace(call, "send", send, from));
    LRMOE_RETURN_IF_ERROR(FindPlace(call, "recv", recv, to));
    if (from != to && from != Place::kNowhere && to != Place::kNowhere)
      return absl::InvalidArgumentError(absl::StrCat(Where(call, rank()), ": send lies in ",
                                                     Name(static_cast<int64_t>(from)), ", recv in ",
                                                     Name(static_cast<int64_t>(to))));
    std::vector<int64_t> mine{static_cast<int64_t>(std::max(from, to))};
    for (const auto& part : send) mine.push_back(static_cast<int64_t>(part.size()));
    for (const auto& part : recv) mine.push_back(static_cast<int64_t>(part.size()));
    std::vector<int64_t> all(mine.size() * size());
    LRMOE_RETURN_IF_ERROR(
        inner_->AllGather(call, std::as_bytes(std::span(mine)), std::as_writable_bytes(std::span(all))));
    if (const std::string disagreement = Disagreement(all); !disagreement.empty()) {
      const absl::Status status =
          absl::FailedPreconditionError(absl::StrCat(Where(call, rank()), ": ", disagreement));
      Abort(status.message());
      return status;
    }
    bool device = false;
    for (int32_t r = 0; r < size(); ++r) device |= PlaceIn(all, r) == static_cast<int64_t>(Place::kDevice);
    absl::StatusOr<Ticket> inner =
        device ? link_->Start(call, send, recv) : inner_->StartAllToAllV(call, send, recv);
    if (!inner.ok()) {
      if (device) inner_->Abort(inner.status().message());
      return inner.status();
    }
    ++started_;
    return Ticket{static_cast<int64_t>(*inner) * 2 + (device ? 1 : 0)};
  }

  absl::StatusOr<std::chrono::steady_clock::time_point> Finish(Ticket ticket, Deadline deadline) override {
    --started_;
    const auto number = static_cast<int64_t>(ticket);
    const Ticket inner{number / 2};
    if (number % 2 == 0) return inner_->Finish(inner, deadline);
    auto done = link_->Finish(inner, deadline);
    if (!done.ok()) inner_->Abort(done.status().message());
    return done;
  }

  void Abort(absl::string_view reason) override {
    inner_->Abort(reason);
    link_->Abort();
  }

 private:
  // Where the parts lie that are not empty; all in one place.
  template <typename Parts>
  absl::Status FindPlace(const Call& call, absl::string_view what, const Parts& parts, Place& place) const {
    for (const auto& part : parts) {
      if (part.empty()) continue;
      const Place here = link_->Holds(part.data()) ? Place::kDevice : Place::kHost;
      if (place != Place::kNowhere && place != here)
        return absl::InvalidArgumentError(
            absl::StrCat(Where(call, rank()), ": ", what, " lies partly in device memory"));
      place = here;
    }
    return absl::OkStatus();
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

  const std::unique_ptr<DeviceLink> link_;
  int started_ = 0;
};

}  // namespace

std::unique_ptr<Transport> CreateLinkedTransport(std::unique_ptr<Transport> control,
                                                 std::unique_ptr<DeviceLink> link) {
  return std::make_unique<LinkedTransport>(std::move(control), std::move(link));
}

}  // namespace lrmoe::transport
