#include "worker/rpc/request_check.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <span>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/status_macros.h"
#include "proto/convert.h"

namespace lrmoe::worker {
namespace {

constexpr int64_t kAny = -1;                                        // a dimension the request itself decides
constexpr int64_t kAlignment = 64;                                  // bytes, of every tensor
constexpr int64_t kMaxPairs = std::numeric_limits<int32_t>::max();  // of one rank: T * k

absl::Status OutOfRange(absl::string_view field, auto value, auto low, auto high) {
  return absl::InvalidArgumentError(absl::StrCat(field, ": ", value, ", allowed is ", low, "..", high));
}

int64_t SizeOf(v1::DataType type) {
  switch (type) {
    case v1::DATA_TYPE_BF16:
      return 2;
    case v1::DATA_TYPE_FP32:
    case v1::DATA_TYPE_INT32:
      return 4;
    case v1::DATA_TYPE_UINT8:
      return 1;
    default:
      return 0;
  }
}

std::string NameOf(v1::DataType type) {
  const std::string name = v1::DataType_Name(type);
  return name.empty() ? absl::StrCat(static_cast<int>(type)) : name;
}

v1::DataType WireType(DataType type) {
  return type == DataType::kBf16 ? v1::DATA_TYPE_BF16 : v1::DATA_TYPE_FP32;
}

// Of the sizes a tensor must have.
// The first sizes of it, as a request can have as many as a message holds.
std::string GivenText(std::span<const int64_t> shape) {
  constexpr size_t kMost = 8;
  const std::string first = absl::StrJoin(shape.first(std::min(shape.size(), kMost)), ", ");
  return shape.size() <= kMost ? absl::StrCat("[", first, "]")
                               : absl::StrCat("[", first, ", ...] of ", shape.size(), " sizes");
}

std::string AllowedText(const std::vector<int64_t>& shape) {
  return absl::StrCat("[",
                      absl::StrJoin(shape, ", ",
                                    [](std::string* out, int64_t size) {
                                      absl::StrAppend(out, size == kAny ? "any" : absl::StrCat(size));
                                    }),
                      "]");
}

struct Access {
  bool written = false;
  bool rows = false;  // of the device: may lie in its memory
};

// Turns the descriptors of one request into spans, and checks that what is written overlaps nothing else.
class Tensors {
 public:
  // Without `device`: everything lies in arenas.
  explicit Tensors(const ArenaSet& arenas, const DeviceShares* device = nullptr)
      : arenas_(arenas), device_(device) {}

  // `shape`: the sizes it must have; kAny allows any. The span is empty when a size is 0 (the arena is then
  // not needed).
  absl::StatusOr<std::span<std::byte>> Get(absl::string_view field, const v1::Tensor& tensor,
                                           v1::DataType type, const std::vector<int64_t>& shape,
                                           Access access = {}) {
    if (tensor.dtype() != type) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ".dtype: ", NameOf(tensor.dtype()), ", allowed is ", NameOf(type)));
    }
    std::vector<int64_t> given(tensor.shape().begin(), tensor.shape().end());
    bool matches = given.size() == shape.size();
    for (size_t i = 0; matches && i < shape.size(); ++i) {
      matches = given[i] >= 0 && (shape[i] == kAny || shape[i] == given[i]);
    }
    if (!matches) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ".shape: ", GivenText(given), ", allowed is ", AllowedText(shape)));
    }
    __int128 bytes = SizeOf(type);
    for (int64_t size : given) {
      if (size == 0) return std::span<std::byte>();
      bytes *= size;
      if (bytes > std::numeric_limits<int64_t>::max()) {
        return absl::InvalidArgumentError(
            absl::StrCat(field, ".shape: ", GivenText(given), " is over 2^63 bytes"));
      }
    }
    return Place(field, tensor, static_cast<int64_t>(bytes), access);
  }

  // Call once, after the last Get.
  absl::Status CheckOverlap() const {
    for (const Used& out : used_) {
      if (!out.written) continue;
      for (const Used& other : used_) {
        const std::less_equal<const std::byte*> not_after;
        if (&out == &other || not_after(out.end, other.begin) || not_after(other.end, out.begin)) continue;
        return absl::InvalidArgumentError(absl::StrCat(out.field, " is written and overlaps ", other.field));
      }
    }
    return absl::OkStatus();
  }

  // The events that order what lies in device memory; null when nothing does.
  absl::StatusOr<std::shared_ptr<const SharedEvents>> Events() const {
    if (on_device_.empty()) return nullptr;
    std::shared_ptr<const SharedEvents> events = device_->events();
    if (events != nullptr) return events;
    return absl::FailedPreconditionError(
        absl::StrCat(on_device_, ".device_memory: nothing orders its use; call ShareEvents first"));
  }

  HeldMemory TakeHeld() { return std::move(held_); }

 private:
  struct Used {
    std::string field;
    const std::byte* begin;
    const std::byte* end;
    bool written;
  };

  absl::StatusOr<std::span<std::byte>> Place(absl::string_view field, const v1::Tensor& tensor, int64_t bytes,
                                             Access access) {
    LRMOE_ASSIGN_OR_RETURN(const std::span<std::byte> memory, Memory(field, tensor, access));
    const auto memory_bytes = static_cast<int64_t>(memory.size());
    const std::string name = tensor.device_memory() != 0
                                 ? absl::StrCat("device memory ", tensor.device_memory())
                                 : absl::StrCat("arena ", tensor.arena());
    if (bytes > memory_bytes) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ": ", bytes, " bytes do not fit ", name, " of ", memory_bytes, " bytes"));
    }
    const int64_t offset = tensor.offset_bytes();
    if (offset < 0 || offset > memory_bytes - bytes || offset % kAlignment != 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(field, ".offset_bytes: ", offset, ", allowed are multiples of ", kAlignment, " in 0..",
                       memory_bytes - bytes, " (", bytes, " bytes in ", name, " of ", memory_bytes, ")"));
    }
    const auto span = memory.subspan(static_cast<size_t>(offset), static_cast<size_t>(bytes));
    used_.push_back({std::string(field), span.data(), span.data() + span.size(), access.written});
    return span;
  }

  // All of what the descriptor names.
  absl::StatusOr<std::span<std::byte>> Memory(absl::string_view field, const v1::Tensor& tensor,
                                              Access access) {
    if (tensor.device_memory() == 0) {
      auto arena = arenas_.Find(tensor.arena());
      if (!arena.ok()) return Named(field, ".arena: ", arena.status());
      held_.push_back(*arena);
      return (*arena)->memory();
    }
    if (tensor.arena() != 0) {
      return absl::InvalidArgumentError(absl::StrCat(field, ": names arena ", tensor.arena(),
                                                     " and device memory ", tensor.device_memory(),
                                                     ", allowed is one of them"));
    }
    if (device_ == nullptr || !access.rows) {
      return absl::InvalidArgumentError(absl::StrCat(field, ".device_memory: ", tensor.device_memory(),
                                                     ", allowed is an arena: the host works on it"));
    }
    auto imported = device_->Find(tensor.device_memory());
    if (!imported.ok()) return Named(field, ".device_memory: ", imported.status());
    if (on_device_.empty()) on_device_ = std::string(field);
    held_.push_back(*imported);
    return (*imported)->memory;
  }

  static absl::Status Named(absl::string_view field, absl::string_view part, const absl::Status& status) {
    return absl::Status(status.code(), absl::StrCat(field, part, status.message()));
  }

  const ArenaSet& arenas_;
  const DeviceShares* const device_;
  std::vector<Used> used_;
  HeldMemory held_;
  std::string on_device_;  // the first field that lies there
};

template <typename T>
std::span<T> As(std::span<std::byte> bytes) {
  return {reinterpret_cast<T*>(bytes.data()), bytes.size() / sizeof(T)};
}

absl::Status CheckExpert(int32_t layer, int32_t expert, const ModelSpec& model) {
  LRMOE_RETURN_IF_ERROR(CheckLayer(layer, model));
  if (expert < 0 || expert >= model.shape.num_experts) {
    return OutOfRange("expert", expert, 0, model.shape.num_experts - 1);
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckLayer(int32_t layer, const ModelSpec& model) {
  if (layer < 0 || layer >= model.num_layers) return OutOfRange("layer", layer, 0, model.num_layers - 1);
  return absl::OkStatus();
}

absl::StatusOr<Invocation> CheckInvocation(const v1::Invocation& invocation, const ModelSpec& model) {
  LRMOE_ASSIGN_OR_RETURN(const Invocation checked, FromWire(invocation));
  const absl::Status layer = CheckLayer(checked.layer, model);
  if (!layer.ok()) return absl::InvalidArgumentError(absl::StrCat("invocation.", layer.message()));
  return checked;
}

absl::StatusOr<ForwardCall> CheckForward(const v1::ForwardRequest& request, const ModelSpec& model,
                                         const ArenaSet& arenas, const DeviceShares& device) {
  ForwardCall call;
  LRMOE_ASSIGN_OR_RETURN(call.args.invocation, CheckInvocation(request.invocation(), model));
  const int64_t h = model.shape.hidden_size, k = model.shape.top_k;
  const v1::DataType type = WireType(model.shape.dtype);
  Tensors tensors(arenas, &device);
  LRMOE_ASSIGN_OR_RETURN(call.args.x, tensors.Get("x", request.x(), type, {kAny, h}, {.rows = true}));
  const int64_t t = request.x().shape(0);
  if (t > kMaxPairs / k) return OutOfRange("x.shape[0]", t, 0, kMaxPairs / k);
  call.args.num_tokens = t;
  LRMOE_ASSIGN_OR_RETURN(auto ids,
                         tensors.Get("expert_idx", request.expert_idx(), v1::DATA_TYPE_INT32, {t, k}));
  LRMOE_ASSIGN_OR_RETURN(auto alpha, tensors.Get("alpha", request.alpha(), v1::DATA_TYPE_FP32, {t, k}));
  LRMOE_ASSIGN_OR_RETURN(call.args.y,
                         tensors.Get("y", request.y(), type, {t, h}, {.written = true, .rows = true}));
  LRMOE_RETURN_IF_ERROR(tensors.CheckOverlap());
  call.args.expert_idx = As<const int32_t>(ids);
  call.args.alpha = As<const float>(alpha);
  call.args.needs_backward = !request.evaluation();
  LRMOE_ASSIGN_OR_RETURN(call.events, tensors.Events());
  call.held = tensors.TakeHeld();
  return call;
}

absl::StatusOr<BackwardCall> CheckBackward(const v1::BackwardRequest& request, const ModelSpec& model,
                                           const ArenaSet& arenas, const DeviceShares& device) {
  BackwardCall call;
  LRMOE_ASSIGN_OR_RETURN(call.args.invocation, CheckInvocation(request.invocation(), model));
  const int64_t h = model.shape.hidden_size, k = model.shape.top_k;
  const v1::DataType type = WireType(model.shape.dtype);
  Tensors tensors(arenas, &device);
  LRMOE_ASSIGN_OR_RETURN(call.args.dy, tensors.Get("dy", request.dy(), type, {kAny, h}, {.rows = true}));
  const int64_t t = request.dy().shape(0);
  LRMOE_ASSIGN_OR_RETURN(call.args.dx,
                         tensors.Get("dx", request.dx(), type, {t, h}, {.written = true, .rows = true}));
  LRMOE_ASSIGN_OR_RETURN(
      auto dalpha, tensors.Get("dalpha", request.dalpha(), v1::DATA_TYPE_FP32, {t, k}, {.written = true}));
  call.args.dalpha = As<float>(dalpha);
  if (request.has_kept()) {
    LRMOE_ASSIGN_OR_RETURN(
        auto kept, tensors.Get("kept", request.kept(), v1::DATA_TYPE_UINT8, {t, k}, {.written = true}));
    call.args.kept = As<uint8_t>(kept);
  }
  LRMOE_RETURN_IF_ERROR(tensors.CheckOverlap());
  LRMOE_ASSIGN_OR_RETURN(call.events, tensors.Events());
  call.held = tensors.TakeHeld();
  return call;
}

absl::StatusOr<LoadExpertCall> CheckLoadExpert(const v1::LoadExpertRequest& request, const ModelSpec& model,
                                               const ArenaSet& arenas) {
  LRMOE_RETURN_IF_ERROR(CheckExpert(request.layer(), request.expert(), model));
  const v1::DataType type = request.gate_up().dtype();
  if (type != v1::DATA_TYPE_FP32 && type != v1::DATA_TYPE_BF16) {
    return absl::InvalidArgumentError(
        absl::StrCat("gate_up.dtype: ", NameOf(type), ", allowed is DATA_TYPE_FP32 or DATA_TYPE_BF16"));
  }
  LoadExpertCall call{.layer = request.layer(),
                      .expert_idx = request.expert(),
                      .type = type == v1::DATA_TYPE_BF16 ? DataType::kBf16 : DataType::kFp32};
  const int64_t h = model.shape.hidden_size, f = model.shape.intermediate_size;
  Tensors tensors(arenas);
  LRMOE_ASSIGN_OR_RETURN(call.w1,
                         tensors.Get("gate_up", request.gate_up(), type, {model.shape.fc1_width(), h}));
  LRMOE_ASSIGN_OR_RETURN(call.w2, tensors.Get("down", request.down(), type, {h, f}));
  call.held = tensors.TakeHeld();
  return call;
}

absl::StatusOr<ExportExpertCall> CheckExportExpert(const v1::ExportExpertRequest& request,
                                                   const ModelSpec& model, const ArenaSet& arenas) {
  LRMOE_RETURN_IF_ERROR(CheckExpert(request.layer(), request.expert(), model));
  ExportExpertCall call{.layer = request.layer(), .expert_idx = request.expert()};
  switch (request.content()) {
    case v1::EXPERT_CONTENT_WEIGHTS:
      call.content = ExpertContent::kWeights;
      break;
    case v1::EXPERT_CONTENT_GRADIENT:
      call.content = ExpertContent::kGradient;
      break;
    default:
      return absl::InvalidArgumentError(
          absl::StrCat("content: ", static_cast<int>(request.content()),
                       ", allowed is EXPERT_CONTENT_WEIGHTS or EXPERT_CONTENT_GRADIENT"));
  }
  const int64_t h = model.shape.hidden_size, f = model.shape.intermediate_size;
  Tensors tensors(arenas);
  LRMOE_ASSIGN_OR_RETURN(auto w1, tensors.Get("gate_up", request.gate_up(), v1::DATA_TYPE_FP32,
                                              {model.shape.fc1_width(), h}, {.written = true}));
  LRMOE_ASSIGN_OR_RETURN(auto w2,
                         tensors.Get("down", request.down(), v1::DATA_TYPE_FP32, {h, f}, {.written = true}));
  LRMOE_RETURN_IF_ERROR(tensors.CheckOverlap());
  call.w1 = As<float>(w1);
  call.w2 = As<float>(w2);
  call.held = tensors.TakeHeld();
  return call;
}

absl::StatusOr<engine::AdamWStep> CheckOptimizerStep(const v1::OptimizerStepRequest& request) {
  const auto in = [](double value, double low, double high) {
    return value >= low && value < high;
  };  // not NaN
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const auto wrong = [](absl::string_view field, double value, absl::string_view allowed) {
    return absl::InvalidArgumentError(absl::StrCat(field, ": ", value, ", allowed is ", allowed));
  };
  if (request.step() < 1) return wrong("step", static_cast<double>(request.step()), "1 and more");
  if (!in(request.lr(), 0, kInfinity)) return wrong("lr", request.lr(), "0 <= lr < infinity");
  if (!in(request.beta1(), 0, 1)) return wrong("beta1", request.beta1(), "0 <= beta1 < 1");
  if (!in(request.beta2(), 0, 1)) return wrong("beta2", request.beta2(), "0 <= beta2 < 1");
  if (!in(request.eps(), 0, kInfinity)) return wrong("eps", request.eps(), "0 <= eps < infinity");
  if (!in(request.weight_decay(), 0, kInfinity)) {
    return wrong("weight_decay", request.weight_decay(), "0 <= weight_decay < infinity");
  }
  if (!std::isfinite(request.gradient_scale())) {
    return wrong("gradient_scale", request.gradient_scale(), "any finite number");
  }
  return engine::AdamWStep{.step = request.step(),
                           .lr = request.lr(),
                           .beta1 = request.beta1(),
                           .beta2 = request.beta2(),
                           .eps = request.eps(),
                           .weight_decay = request.weight_decay(),
                           .gradient_scale = request.gradient_scale()};
}

absl::Status CheckCheckpointStep(int64_t step) {
  if (step < 0 || step > kMaxStep) return OutOfRange("step", step, 0, kMaxStep);
  return absl::OkStatus();
}

absl::Status CheckDirectory(const std::string& directory) {
  constexpr size_t kMaxPath = 4000;  // PATH_MAX, less the names of the files inside
  if (directory.empty() || directory.size() > kMaxPath || directory.front() != '/' ||
      directory.find('\0') != std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("directory: \"", directory.substr(0, 200),
                                                   "\", allowed is an absolute path of at most ", kMaxPath,
                                                   " bytes"));
  }
  return absl::OkStatus();
}

}  // namespace lrmoe::worker
