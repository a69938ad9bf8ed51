"""The calls of a session, and noticing that the worker is gone."""

import logging
import os
import threading
import time

import grpc

from . import protocol
from .errors import Error, WorkerLost
from .lane import CALLS, Lane, LaneFailed

_CHANNEL_OPTIONS = (
    ("grpc.enable_http_proxy", 0),
    ("grpc.enable_retries", 0),  # nothing here may run twice
    ("grpc.max_receive_message_length", 4 << 20),
)
# How long a failed call waits for the session's stream to tell why. The two race when a worker dies.
_REASON_WAIT_S = 0.3
_log = logging.getLogger("lrmoe")


class Connection:
    """A channel to one worker. Calls may come from any thread; collective ones must not run at the same time."""

    def __init__(self, socket, connect_timeout_s, call_timeout_s):
        self.socket = socket
        self._call_timeout_s = call_timeout_s
        deadline = time.monotonic() + connect_timeout_s
        # A Unix channel that finds no socket backs off for a second and more: look for the file first.
        while not os.path.exists(socket):
            if time.monotonic() >= deadline:
                raise WorkerLost(f"no worker at {socket}: the socket does not exist after {connect_timeout_s} s")
            time.sleep(0.01)
        self._channel = grpc.insecure_channel(f"unix:{os.path.abspath(socket)}", options=_CHANNEL_OPTIONS)
        try:
            grpc.channel_ready_future(self._channel).result(timeout=max(0.1, deadline - time.monotonic()))
        except grpc.FutureTimeoutError:
            self._channel.close()
            raise WorkerLost(f"no worker answers at {socket} after {connect_timeout_s} s") from None
        self._calls = {
            name: self._channel.unary_unary(method.path, method.request.SerializeToString, method.response.FromString)
            for name, method in protocol.METHODS.items() if not method.server_streaming
        }
        self._stream = None
        self._lane = None
        self._ended = threading.Event()
        self._end_reason = ""

    def call(self, name, request):
        """One unary call. Raises Error, or WorkerLost when no further call can succeed."""
        if self._ended.is_set():
            raise WorkerLost(self._end_reason)
        try:
            if self._lane is not None and name in CALLS:
                return self._lane.call(name, request)
            return self._calls[name](request, timeout=self._call_timeout_s)
        except grpc.RpcError as error:
            raise self._translate(name, error.code().name, error.details() or "") from None
        except LaneFailed as error:
            raise self._translate(name, error.code, error.details) from None

    @property
    def has_lane(self):
        """Whether forward and backward passes go through the worker's lane, and not through gRPC."""
        return self._lane is not None

    def attach(self, request):
        """Opens the session; its stream is then read in the background until it ends. Returns the Attached message."""
        method = protocol.METHODS["Attach"]
        start = self._channel.unary_stream(method.path, method.request.SerializeToString, method.response.FromString)
        stream = start(request)
        try:
            event = next(stream)
        except StopIteration:
            raise WorkerLost(f"worker at {self.socket} ended the session before it began") from None
        except grpc.RpcError as error:
            raise self._translate("Attach", error.code().name, error.details() or "") from None
        if event.WhichOneof("event") != "attached":
            raise WorkerLost(event.ended.reason or f"worker at {self.socket} refused the session")
        self._stream = stream
        threading.Thread(target=self._watch, name="lrmoe-session", daemon=True).start()
        self._open_lane(event.attached.lane)
        return event.attached

    def close(self):
        self._end("the session was closed")
        if self._stream is not None:
            self._stream.cancel()
        if self._lane is not None:
            self._lane.close()
        self._channel.close()

    def _open_lane(self, path):
        if os.environ.get("LRMOE_LANE", "1") == "0":
            _log.info("forward and backward go through gRPC, because LRMOE_LANE is 0")
        elif not path:
            _log.warning("forward and backward go through gRPC, which is slower: the worker at %s has no lane", self.socket)
        else:
            try:
                self._lane = Lane(path, self._call_timeout_s)
                _log.info("forward and backward go through %s", path)
            except OSError as error:
                _log.warning("forward and backward go through gRPC, which is slower: %s: %s", path, error)

    def _watch(self):
        reason = f"the worker at {self.socket} ended the session"
        try:
            for event in self._stream:
                if event.WhichOneof("event") == "ended":
                    reason = event.ended.reason
                    break
        except grpc.RpcError as error:
            reason = f"lost the worker at {self.socket}: {error.details()}"
        self._end(reason)

    def _end(self, reason):
        if not self._ended.is_set():
            self._end_reason = reason
            self._ended.set()

    def _translate(self, name, code, details):
        gone = code in ("UNAVAILABLE", "CANCELLED")
        if gone and self._stream is not None:
            self._ended.wait(_REASON_WAIT_S)
        if self._ended.is_set() and (gone or code == "UNKNOWN"):
            return WorkerLost(f"{name}: {self._end_reason}" + (f" ({details})" if details else ""))
        if code == "UNAVAILABLE":
            return WorkerLost(f"{name}: {details}")
        if code == "DEADLINE_EXCEEDED" and not details.strip():
            details = f"no answer to {name} within {self._call_timeout_s} s"
        return Error(code, details)
