"""Forward and backward calls through the worker's lane: whole messages on a Unix socket (LaneCall, LaneReply).

gRPC takes longer to carry a call than a small layer takes to compute; this takes two system calls on each side. Waiting
releases the interpreter's lock, and Ctrl-C works."""

import socket
import threading

from . import protocol

CALLS = {"Forward": "forward", "Backward": "backward"}
_STATUS_NAMES = ("OK", "CANCELLED", "UNKNOWN", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "NOT_FOUND", "ALREADY_EXISTS",
                 "PERMISSION_DENIED", "RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "ABORTED", "OUT_OF_RANGE",
                 "UNIMPLEMENTED", "INTERNAL", "UNAVAILABLE", "DATA_LOSS", "UNAUTHENTICATED")
_MAX_BYTES = 64 << 10


class LaneFailed(Exception):
    """code: the gRPC status name of a call that did not succeed; details: the worker's words."""

    def __init__(self, code, details):
        super().__init__(f"{code}: {details}")
        self.code, self.details = code, details


class Lane:
    """A connection to a lane. One call at a time; a second thread waits for its turn."""

    def __init__(self, path, timeout_s):
        self._lock = threading.Lock()
        self._number = 0
        self._buffer = bytearray(_MAX_BYTES)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            self._socket.settimeout(timeout_s)
            self._socket.connect(path)
        except OSError:
            self._socket.close()
            raise

    def call(self, name, request):
        """The response. Raises LaneFailed: DEADLINE_EXCEEDED without details when none came in time, UNAVAILABLE when the
        worker is gone, else what the worker says."""
        field = CALLS[name]
        with self._lock:
            self._number += 1
            try:
                self._socket.send(protocol.LaneCall(number=self._number, **{field: request}).SerializeToString())
                reply = self._receive()
                while reply.number != self._number:  # of an earlier call, which was given up
                    reply = self._receive()
            except socket.timeout:
                raise LaneFailed("DEADLINE_EXCEEDED", "") from None
            except OSError as error:
                raise LaneFailed("UNAVAILABLE", f"the connection to the worker failed: {error.strerror}") from None
        if reply.code != 0:
            raise LaneFailed(_STATUS_NAMES[reply.code] if reply.code < len(_STATUS_NAMES) else "UNKNOWN", reply.message)
        return getattr(reply, field)

    def close(self):
        self._socket.close()

    def _receive(self):
        size = self._socket.recv_into(self._buffer)
        if size == 0:
            raise LaneFailed("UNAVAILABLE", "the worker closed the connection")
        return protocol.LaneReply.FromString(bytes(memoryview(self._buffer)[:size]))
