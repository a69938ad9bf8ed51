// The attached training process. A worker serves one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/layer_shape.h"
#include "worker/rpc/arena.h"
#include "worker/rpc/attach_stream.h"
#include "worker/rpc/device_memory.h"

namespace lrmoe::worker {

struct Session {
  Session(uint64_t session_id, std::string client_name, const ModelSpec& its_model, const ArenaLimits& limits,
          size_t max_imports)
      : id(session_id),
        client(std::move(client_name)),
        model(its_model),
        arenas(limits),
        device(max_imports) {}

  const uint64_t id;  // random: a client of an earlier session cannot hit this one by accident
  const std::string client;
  const ModelSpec model;  // valid
  ArenaSet arenas;
  DeviceShares device;
  std::shared_ptr<AttachStream> stream;  // set before the session is opened
};

// Any thread.
class SessionTable {
 public:
  // The only session from now on. AlreadyExists naming the client that is attached.
  absl::Status Open(std::shared_ptr<Session> session);
  // FailedPrecondition when `id` is not the open session.
  absl::StatusOr<std::shared_ptr<Session>> Find(uint64_t id) const;
  // Null when `id` is not the open session.
  std::shared_ptr<Session> Close(uint64_t id);
  std::shared_ptr<Session> current() const;  // may be null

 private:
  mutable std::mutex mutex_;
  std::shared_ptr<Session> current_;  // guarded by mutex_
};

}  // namespace lrmoe::worker
