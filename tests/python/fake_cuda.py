"""A CUDA for lrmoe.device without a GPU: a device's memory is memory files, which a fake worker opens by their handles,
events note in the list of a fake worker's calls what happens to them, and a tensor is on the device when it lies there."""

import contextlib
import itertools
import mmap
import os

import torch

from lrmoe.device import CannotShare

UUID = bytes(range(16))


class FakeEvent:
    def __init__(self, calls, name):
        self.calls, self.name = calls, name

    def record(self, stream):
        self.calls.append((f"record {self.name}", stream))

    def wait(self, stream):
        self.calls.append((f"wait for {self.name}", stream))


class FakeCuda:
    """What lrmoe.device.Cuda is, for device 0."""

    def __init__(self, calls, allocation_bytes=1 << 16):
        self.calls, self.allocation_bytes = calls, allocation_bytes
        self.expandable = False
        self.numbers = itertools.count(1)
        self.allocations = {}  # base -> [bytes, number, file descriptor, memory, bytes in use]

    def allocate(self):
        fd = os.memfd_create("device")
        os.ftruncate(fd, self.allocation_bytes)
        memory = memoryview(mmap.mmap(fd, self.allocation_bytes))
        base = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        self.allocations[base] = [self.allocation_bytes, next(self.numbers), fd, memory, 0]
        return base

    def put(self, tensor):
        """A copy on the device; a leaf."""
        return self.empty(tensor.shape, tensor.dtype, 0).copy_(tensor.detach()).requires_grad_(tensor.requires_grad)

    # lrmoe.device.Cuda

    def uuid(self, ordinal):
        return UUID

    def ordinal(self, tensor):
        return 0 if self.base(tensor.data_ptr()) is not None else None

    def base(self, address):
        return next((base for base, (size, *_) in self.allocations.items() if 0 <= address - base < size), None)

    def allocation(self, address):
        base = self.base(address)
        return base, self.allocations[base][0], self.number(address)

    def number(self, address):
        base = self.base(address)
        return 0 if base is None else self.allocations[base][1]

    def handle(self, base):
        if self.expandable:
            raise CannotShare("expandable segments")
        return f"/proc/{os.getpid()}/fd/{self.allocations[base][2]}".encode().ljust(64)

    def on(self, ordinal):
        return contextlib.nullcontext()

    def empty(self, shape, dtype, ordinal):
        count = torch.Size(shape).numel()
        if count == 0:
            return torch.empty(shape, dtype=dtype)
        num_bytes = count * torch.empty(0, dtype=dtype).element_size()
        base = next((b for b, a in self.allocations.items() if a[0] - a[4] >= num_bytes), None) or self.allocate()
        allocation = self.allocations[base]
        offset, allocation[4] = allocation[4], allocation[4] + -(-num_bytes // 512) * 512
        return torch.frombuffer(allocation[3], dtype=dtype, count=count, offset=offset).resize_(shape)

    def make_event(self):
        return FakeEvent(self.calls, "ready"), b"client's event".ljust(64)

    def open_event(self, ordinal, handle):
        return FakeEvent(self.calls, handle.decode().rstrip())

    def stream(self, ordinal):
        return "stream"
