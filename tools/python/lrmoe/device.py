"""Tensors on the worker's device, used by the worker where they are: CUDA IPC.

A CUDA IPC handle names a whole allocation, of which PyTorch's allocator makes many tensors: the worker opens each
allocation once and is told offsets. Handles come from the driver and not from UntypedStorage._share_cuda_, which gives no
size of the allocation, packs the handle differently from version to version and leaves a reference count and an event
behind for every call.

The driver numbers allocations, so one that PyTorch gave back, and another that took its place, are noticed: such imports
are released when the next new allocation is seen. Until then their memory is not free for others.
"""

import contextlib
import ctypes
import logging
import threading

import torch

from . import protocol
from .arena import ALIGNMENT, WIRE_TYPES
from .errors import Error

_log = logging.getLogger("lrmoe")
_HANDLE_BYTES = 64
_BUFFER_ID, _IPC_CAPABLE = 7, 10  # CU_POINTER_ATTRIBUTE_BUFFER_ID, _IS_LEGACY_CUDA_IPC_CAPABLE


class CannotShare(Exception):
    """Why the worker cannot use a tensor where it is."""


class Driver:
    """The functions of the CUDA driver that PyTorch does not offer. PyTorch has loaded and initialised it."""

    def __init__(self, library=None):
        try:
            self._library = library or ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise CannotShare(f"the CUDA driver cannot be loaded: {error}") from None

    def uuid(self, ordinal):
        """16 bytes, the same in every process."""
        device, uuid = ctypes.c_int(), (ctypes.c_ubyte * 16)()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self._call("cuDeviceGetUuid_v2", uuid, device)
        return bytes(uuid)

    def allocation(self, address):
        """(base, bytes, number) of the allocation an address lies in; no two of a process have the same number."""
        base, size = ctypes.c_uint64(), ctypes.c_size_t()
        self._call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(address))
        return base.value, size.value, self.number(address)

    def number(self, address):
        """Of the allocation an address lies in; 0 when it lies in none."""
        number = ctypes.c_uint64()
        get = self._library.cuPointerGetAttribute
        return number.value if get(ctypes.byref(number), _BUFFER_ID, ctypes.c_uint64(address)) == 0 else 0

    def handle(self, base):
        """The IPC handle of an allocation. Raises CannotShare when it has none."""
        capable = ctypes.c_int(0)
        self._call("cuPointerGetAttribute", ctypes.byref(capable), _IPC_CAPABLE, ctypes.c_uint64(base))
        if not capable.value:
            raise CannotShare("PyTorch allocates from expandable segments (or another pool of virtual memory), which have no "
                              "CUDA IPC handles; set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False")
        handle = (ctypes.c_ubyte * _HANDLE_BYTES)()
        self._call("cuIpcGetMemHandle", handle, ctypes.c_uint64(base))
        return bytes(handle)

    def _call(self, name, *arguments):
        error = getattr(self._library, name)(*arguments)
        if error != 0:
            raise CannotShare(f"{name}: CUDA driver error {error}")


class Cuda:
    """What a DevicePool needs of CUDA. Devices are ordinals of this process."""

    def __init__(self, driver=None):
        driver = driver or Driver()
        self.uuid, self.allocation, self.number, self.handle = driver.uuid, driver.allocation, driver.number, driver.handle

    @staticmethod
    def ordinal(tensor):
        """Of the device a tensor is on; None when that is no CUDA device."""
        return tensor.device.index if tensor.is_cuda else None

    @staticmethod
    @contextlib.contextmanager
    def on(ordinal):
        """The device is current in this thread, also for the driver's functions."""
        with torch.cuda.device(ordinal):
            torch.cuda.current_stream().query()  # the runtime makes its context current when it is called, not before
            yield

    @staticmethod
    def empty(shape, dtype, ordinal):
        return torch.empty(shape, dtype=dtype, device=torch.device("cuda", ordinal))

    @staticmethod
    def make_event():
        """(event, handle): an event of the current device for other processes."""
        event = torch.cuda.Event(interprocess=True)
        return event, event.ipc_handle()

    @staticmethod
    def open_event(ordinal, handle):
        return torch.cuda.Event.from_ipc_handle(torch.device("cuda", ordinal), handle)

    @staticmethod
    def stream(ordinal):
        return torch.cuda.current_stream(ordinal)


class DevicePool:
    """Rows on one device, the worker's. The same interface as ArenaPool; for rows only: what the worker's host works on
    (expert ids, routing weights and their gradients) crosses in arenas."""

    def __init__(self, connection, session, uuid, ordinal, cuda):
        self._connection, self._session, self._uuid, self._ordinal, self._cuda = connection, session, uuid, ordinal, cuda
        self._lock = threading.Lock()
        self._imports = {}  # base -> (bytes, number, id in the worker)
        self._lost = []     # tensors that the worker may still write to
        with cuda.on(ordinal):
            self._ready, handle = cuda.make_event()
            answer = self._call("ShareEvents", device_uuid=uuid, handle=handle)
            self._done = cuda.open_event(ordinal, answer.handle)

    def empty(self, shape, dtype):
        """An uninitialised tensor that the worker can write."""
        tensor = self._cuda.empty(shape, dtype, self._ordinal)
        self._place(tensor)
        return tensor

    def share(self, tensor, dtype):
        """`tensor` as a contiguous tensor of dtype at an address the worker takes: itself when it is one already, else a
        copy on the device."""
        tensor = tensor.detach()
        if tensor.dtype != dtype or not tensor.is_contiguous() or tensor.data_ptr() % ALIGNMENT != 0:
            copy = self._cuda.empty(tensor.shape, dtype, self._ordinal)
            tensor = copy.copy_(tensor)
        self._place(tensor)
        return tensor

    def descriptor(self, tensor, shape=None):
        """The wire descriptor of a tensor of empty() or share(); `shape` to describe it reshaped."""
        device_memory, offset = self._place(tensor)
        return protocol.Tensor(device_memory=device_memory, offset_bytes=offset, dtype=WIRE_TYPES[tensor.dtype],
                               shape=tensor.shape if shape is None else shape)

    def before_call(self):
        """The worker's device waits for what this thread's stream was given so far."""
        self._ready.record(self._cuda.stream(self._ordinal))

    def after_call(self):
        """What this thread's stream is given from now on waits for what the worker's device does for the call."""
        self._done.wait(self._cuda.stream(self._ordinal))

    def after_error(self, error, *tensors):
        """A call with these tensors failed. One that got no answer may still write to them: their memory is given up."""
        if error.code == "DEADLINE_EXCEEDED":
            self._lost.append(tensors)

    def _place(self, tensor):
        """(id, offset) of a tensor in the worker's eyes."""
        if tensor.numel() == 0:  # needs no place
            return 0, 0
        address = tensor.data_ptr()
        base, num_bytes, number = self._cuda.allocation(address)
        with self._lock:
            known = self._imports.get(base)
            if known is None or known[:2] != (num_bytes, number):
                self._release_freed()
                with self._cuda.on(self._ordinal):
                    handle = self._cuda.handle(base)
                answer = self._call("ImportDeviceMemory", device_uuid=self._uuid, handle=handle, bytes=num_bytes)
                known = self._imports[base] = num_bytes, number, answer.device_memory
        return known[2], address - base

    def _release_freed(self):
        for base, (_, number, device_memory) in list(self._imports.items()):
            if self._cuda.number(base) != number:
                del self._imports[base]
                self._call("ReleaseDeviceMemory", device_memory=device_memory)

    def _call(self, name, **fields):
        return self._connection.call(name, protocol.METHODS[name].request(session=self._session, **fields))


class RowPlaces:
    """Where the rows of calls go: to the worker's device where they are, else through its arenas."""

    def __init__(self, connection, attached, arenas):
        self._connection, self._attached, self._arenas = connection, attached, arenas
        self._cuda = None   # made for the first tensor that may be on a device
        self._pools = {}    # ordinal -> DevicePool, or None: not the worker's device
        self._told = False  # that CUDA tensors are copied, and why
        self._copies = False
        if not attached.device_uuid:
            self._copies = True
            self._reason = "the worker computes on the CPU"

    def place(self, rows, dtype, out_shape):
        """(pool, rows, out): the rows as the worker takes them and a tensor for its result, both in one pool."""
        try:
            pool = self._pool_of(rows)
            if pool is not None:
                return pool, pool.share(rows, dtype), pool.empty(out_shape, dtype)
        except (CannotShare, Error) as error:
            if isinstance(error, Error) and error.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
                raise
            self._copies, self._reason = True, str(error)
        if rows.is_cuda and not self._told:
            self._told = True
            _log.warning("CUDA tensors are copied through shared memory: %s", self._reason)
        return self._arenas, self._arenas.share(rows, dtype), self._arenas.empty(out_shape, dtype)

    def _pool_of(self, rows):
        if self._copies:
            return None
        if self._cuda is None:
            self._cuda = Cuda()
        ordinal = self._cuda.ordinal(rows)
        if ordinal is None:
            return None
        if ordinal not in self._pools:
            self._pools[ordinal] = self._open(ordinal)
        return self._pools[ordinal]

    def _open(self, ordinal):
        uuid = self._cuda.uuid(ordinal)
        if uuid != self._attached.device_uuid:
            self._reason = (f"they are on the device with UUID {uuid.hex()}, the worker computes on "
                            f"{self._attached.device_uuid.hex()}")
            return None
        pool = DevicePool(self._connection, self._attached.session, uuid, ordinal, self._cuda)
        _log.info("the worker uses tensors on cuda:%d where they are", ordinal)
        return pool
