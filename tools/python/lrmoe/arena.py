"""Tensors in the shared memory of the worker.

The worker owns arenas; this process maps them. Slots of an arena become torch tensors without a copy. A slot is free
again when the tensor's *storage* dies, whatever views, autograd contexts or other threads kept it alive until then.
"""

import collections
import mmap
import os
import threading
import weakref

import torch

from . import protocol
from .errors import Error

ALIGNMENT = 64
FIRST_ARENA_BYTES = 16 << 20
LARGEST_GROWTH_BYTES = 1 << 30  # arenas double up to here; a larger tensor gets one of its own size

WIRE_TYPES = {
    torch.bfloat16: protocol.DATA_TYPE_BF16,
    torch.float32: protocol.DATA_TYPE_FP32,
    torch.int32: protocol.DATA_TYPE_INT32,
    torch.uint8: protocol.DATA_TYPE_UINT8,
}
_ITEM_BYTES = {torch.bfloat16: 2, torch.float32: 4, torch.int32: 4, torch.uint8: 1}


class _Arena:
    def __init__(self, message):
        self.id = message.arena
        self.num_bytes = message.bytes
        fd = os.open(message.path, os.O_RDWR | os.O_CLOEXEC)
        try:
            self.view = memoryview(mmap.mmap(fd, message.bytes))
        finally:
            os.close(fd)
        self.address = torch.frombuffer(self.view, dtype=torch.uint8).data_ptr()
        self.free = [(0, message.bytes)]  # (offset, bytes), ascending, never adjacent


class ArenaPool:
    """Slots of all arenas of a session. Any thread may allocate; slots come back from any thread."""

    def __init__(self, connection, session):
        self._connection = connection
        self._session = session
        self._lock = threading.Lock()
        self._arenas = []
        # Slots that died. A callback can run anywhere, also inside an allocation: it only moves an entry.
        self._dead = dead = collections.deque()
        # Of slots that live: id of the weak reference -> (the reference, place). A weakref.finalize each would take as
        # long as copying a small tensor.
        self._live = live = {}
        self._on_death = lambda reference: dead.append(live.pop(id(reference))[1])
        # (bytes) -> [(arena, offset)]: slots of a size seen before; a training loop lives from these.
        self._cached = collections.defaultdict(list)

    def empty(self, shape, dtype):
        """An uninitialised tensor in shared memory. dtype: bfloat16, float32, int32 or uint8."""
        if dtype not in WIRE_TYPES:
            raise Error("INVALID_ARGUMENT", f"dtype: {dtype} cannot be shared; one of {list(WIRE_TYPES)}")
        count = 1
        for size in shape:
            count *= size
        if count == 0:
            return torch.empty(shape, dtype=dtype)  # needs no place; see descriptor()
        slot_bytes = -(-count * _ITEM_BYTES[dtype] // ALIGNMENT) * ALIGNMENT
        arena, offset = self._allocate(slot_bytes)
        slot = arena.view[offset:offset + slot_bytes]
        # The tensor's storage holds the memoryview and nothing else does.
        reference = weakref.ref(slot, self._on_death)
        self._live[id(reference)] = reference, (arena, offset, slot_bytes)
        # Shaped in place: a view could not be modified in place once autograd knows it.
        return torch.frombuffer(slot, dtype=dtype, count=count).resize_(shape)

    def share(self, tensor, dtype):
        """`tensor` as a contiguous tensor of dtype in shared memory: itself when it is one already, else one copy."""
        tensor = tensor.detach()
        if tensor.dtype == dtype and tensor.is_contiguous() and self._find(tensor) is not None:
            return tensor
        shared = self.empty(tensor.shape, dtype)
        shared.copy_(tensor)
        return shared

    def descriptor(self, tensor, shape=None):
        """The wire descriptor of a contiguous tensor that lies in an arena; `shape` to describe it reshaped."""
        place = self._find(tensor)
        if place is None or not tensor.is_contiguous():
            raise ValueError("tensor does not lie contiguously in an arena of this session")
        return protocol.Tensor(arena=place[0], offset_bytes=place[1], dtype=WIRE_TYPES[tensor.dtype],
                               shape=tensor.shape if shape is None else shape)

    # As DevicePool's: the processor and its memory need no order.
    def before_call(self):
        pass

    def after_call(self):
        pass

    def after_error(self, error, *tensors):
        pass

    @property
    def num_bytes(self):
        """Bytes of all arenas."""
        return sum(arena.num_bytes for arena in self._arenas)

    def _find(self, tensor):
        if tensor.device.type != "cpu":
            return None
        if tensor.numel() == 0:  # has no address of its own, but a descriptor must name an arena
            with self._lock:
                if not self._arenas:
                    self._grow(ALIGNMENT)
            return self._arenas[0].id, 0
        address = tensor.data_ptr()
        for arena in self._arenas:
            offset = address - arena.address
            if 0 <= offset < arena.num_bytes:
                return (arena.id, offset) if offset % ALIGNMENT == 0 else None
        return None

    def _allocate(self, num_bytes):
        with self._lock:
            self._collect()
            cached = self._cached.get(num_bytes)
            if cached:
                return cached.pop()
            place = self._carve(num_bytes)
            if place is None and self._cached:
                self._merge()
                place = self._carve(num_bytes)
            if place is None:
                self._grow(num_bytes)
                place = self._carve(num_bytes)
            return place

    def _collect(self):
        while self._dead:
            arena, offset, num_bytes = self._dead.popleft()
            self._cached[num_bytes].append((arena, offset))

    def _carve(self, num_bytes):
        for arena in self._arenas:
            for index, (offset, free_bytes) in enumerate(arena.free):
                if free_bytes >= num_bytes:
                    if free_bytes == num_bytes:
                        del arena.free[index]
                    else:
                        arena.free[index] = (offset + num_bytes, free_bytes - num_bytes)
                    return arena, offset
        return None

    def _merge(self):
        """Returns the cached slots to their arenas' free lists, neighbours joined."""
        for num_bytes, places in self._cached.items():
            for arena, offset in places:
                arena.free.append((offset, num_bytes))
        self._cached.clear()
        for arena in self._arenas:
            joined = []
            for offset, num_bytes in sorted(arena.free):
                if joined and joined[-1][0] + joined[-1][1] == offset:
                    joined[-1] = (joined[-1][0], joined[-1][1] + num_bytes)
                else:
                    joined.append((offset, num_bytes))
            arena.free = joined

    def _grow(self, num_bytes):
        wanted = min(max(self.num_bytes, FIRST_ARENA_BYTES), LARGEST_GROWTH_BYTES)
        request = protocol.CreateArenaRequest(session=self._session, bytes=max(wanted, num_bytes))
        self._arenas.append(_Arena(self._connection.call("CreateArena", request)))
