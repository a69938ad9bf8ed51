"""Tensors on the worker's device, without a GPU: which tensors are named where they are, in which order, and when not."""

import ctypes
import unittest
from unittest import mock

import grpc
import torch

import lrmoe
from lrmoe import device
from fake_cuda import UUID, FakeCuda
from fake_session import H, FakeSession
from fake_worker import refuse


class DeviceSession(FakeSession):
    worker_uuid = UUID

    def setUp(self):
        super().setUp()
        self.fake.device_uuid = self.worker_uuid
        self.cuda = FakeCuda(self.fake.calls)
        patch = mock.patch.object(device, "Cuda", lambda: self.cuda)
        patch.start()
        self.addCleanup(patch.stop)

    def names(self):
        return [name for name, _ in self.fake.calls]

    def run_layer(self, layer, batch, dy, put=lambda tensor: tensor):
        x, ids, alpha = put(batch[0].detach()).requires_grad_(), batch[1], batch[2].detach().requires_grad_()
        y = layer(x, ids, alpha)
        gradients = torch.autograd.grad(y, [x, alpha], put(dy))
        return y, *gradients


class WhereTheyAreTest(DeviceSession):
    def test_rows_stay_where_they_are_and_results_are_the_same(self):
        layer = self.layer(self.connect())
        batch, dy = self.batch(6), self.random(6, H)
        through_arena = self.run_layer(layer, batch, dy)
        self.assertNotIn("ImportDeviceMemory", self.names())
        self.fake.calls.clear()
        on_device = self.run_layer(layer, batch, dy, self.cuda.put)
        for got, want in zip(on_device, through_arena):
            self.assertTrue(torch.equal(got, want))
        self.assertEqual([self.cuda.ordinal(t) for t in on_device], [0, 0, None])
        self.assertEqual(self.names(), ["ShareEvents", "ImportDeviceMemory", "record ready", "Forward",
                                        "wait for worker's event", "record ready", "Backward", "wait for worker's event"])
        forward, backward = self.requests("Forward")[0], self.requests("Backward")[0]
        base = next(iter(self.cuda.allocations))
        self.assertEqual([t.device_memory != 0 for t in (forward.x, forward.y, backward.dy, backward.dx)], [True] * 4)
        self.assertEqual([t.arena for t in (forward.x, forward.y, backward.dy, backward.dx)], [0] * 4)
        self.assertEqual([t.device_memory for t in (forward.expert_idx, forward.alpha, backward.dalpha, backward.kept)],
                         [0] * 4)
        self.assertEqual(forward.y.offset_bytes, on_device[0].data_ptr() - base)
        self.assertEqual(backward.dx.offset_bytes, on_device[1].data_ptr() - base)
        self.assertEqual(forward.x.offset_bytes, 0)  # the first that was put there: not a copy

    def test_what_the_worker_cannot_read_is_copied_on_the_device(self):
        layer = self.layer(self.connect())
        x, ids, alpha = self.batch(4)
        plain = layer(x, ids, alpha)
        room = self.cuda.put(torch.zeros(4 * H + 8))
        misaligned = room[1:4 * H + 1].view(4, H).copy_(x.detach())
        columns = self.cuda.put(x.detach().t().contiguous()).t()
        for given in (misaligned, columns, self.cuda.put(x.detach().double())):
            self.fake.calls.clear()
            y = layer(given, ids, alpha)
            self.assertTrue(torch.equal(y, plain.to(given.dtype)))
            self.assertNotEqual(self.requests("Forward")[0].x.device_memory, 0)

    def test_an_allocation_is_imported_once_and_given_back_when_it_is_gone(self):
        layer = self.layer(self.connect())
        x, ids, alpha = self.batch(4)
        on_device = self.cuda.put(x.detach())
        for _ in range(3):
            layer(on_device, ids, alpha)
        self.assertEqual(self.names().count("ImportDeviceMemory"), 1)
        first = self.requests("Forward")[0].x.device_memory
        base = self.cuda.base(on_device.data_ptr())
        self.cuda.allocations[base][1] = next(self.cuda.numbers)  # freed, and another one in its place
        layer(on_device, ids, alpha)
        self.assertEqual([r.device_memory for r in self.requests("ReleaseDeviceMemory")], [first])
        self.assertEqual(self.names().count("ImportDeviceMemory"), 2)
        self.cuda.allocation_bytes *= 2
        layer(torch.frombuffer(self.cuda.allocations[self.cuda.allocate()][3], dtype=torch.float32,
                               count=4 * H).view(4, H).copy_(x.detach()), ids, alpha)
        self.assertEqual(self.names().count("ImportDeviceMemory"), 3)
        self.assertEqual(self.names().count("ReleaseDeviceMemory"), 1)

    def test_no_tokens_need_no_place(self):
        layer = self.layer(self.connect())
        self.run_layer(layer, self.batch(2), self.random(2, H), self.cuda.put)
        pool = layer._worker._row_places._pools[0]
        empty = pool.descriptor(pool.share(pool.empty((0, H), torch.float32), torch.float32))
        self.assertEqual((empty.device_memory, empty.arena, list(empty.shape)), (0, 0, [0, H]))

    def test_tensors_of_a_call_without_an_answer_are_not_used_again(self):
        layer = self.layer(self.connect(call_timeout=2))
        x, ids, alpha = self.batch(3)
        on_device = self.cuda.put(x.detach())
        layer(on_device, ids, alpha)
        pool = layer._worker._row_places._pools[0]
        with self.fake.lock, self.assertRaisesRegex(lrmoe.Error, "DEADLINE_EXCEEDED"):
            layer(on_device, ids, alpha)
        self.assertEqual(len(pool._lost), 1)


class CopiedTest(DeviceSession):
    def check_copied(self, reason):
        layer = self.layer(self.connect())
        batch, dy = self.batch(5), self.random(5, H)
        want = self.run_layer(layer, batch, dy)
        with mock.patch.object(torch.Tensor, "is_cuda", property(lambda t: self.cuda.ordinal(t) == 0)), \
                self.assertLogs("lrmoe", "WARNING") as logs:
            for _ in range(2):
                got = self.run_layer(layer, batch, dy, self.cuda.put)
        for one, other in zip(got, want):
            self.assertTrue(torch.equal(one, other))
        self.assertEqual(len(logs.output), 1)
        self.assertRegex(logs.output[0], f"copied through shared memory: .*{reason}")
        self.assertEqual({r.x.device_memory for r in self.requests("Forward")}, {0})

    def test_expandable_segments(self):
        self.cuda.expandable = True
        self.check_copied("expandable segments")

    def test_refused_import(self):
        self.fake.ImportDeviceMemory = lambda request: refuse("1024 allocations", grpc.StatusCode.RESOURCE_EXHAUSTED)
        self.check_copied("1024 allocations")

    def test_no_driver(self):
        with mock.patch.object(device, "Cuda", mock.Mock(side_effect=device.CannotShare("no driver"))):
            self.check_copied("no driver")


class OtherDeviceTest(CopiedTest):
    worker_uuid = UUID[::-1]
    test_expandable_segments = test_refused_import = test_no_driver = None

    def test_both_are_named(self):
        self.check_copied(f"UUID {UUID.hex()}, the worker computes on {UUID[::-1].hex()}")


class CpuWorkerTest(CopiedTest):
    worker_uuid = b""
    test_expandable_segments = test_refused_import = test_no_driver = None

    def test_said(self):
        self.check_copied("the worker computes on the CPU")


class FakeLibrary:
    """The driver's functions over one allocation of 4096 bytes at 0x10000."""

    def __init__(self):
        self.capable, self.error = 1, 0

    def cuDeviceGet(self, device, ordinal):
        device._obj.value = ordinal.value + 40
        return 0

    def cuDeviceGetUuid_v2(self, uuid, device):
        uuid[:] = [device.value] * 16
        return 0

    def cuMemGetAddressRange_v2(self, base, size, address):
        base._obj.value, size._obj.value = 0x10000, 4096
        return self.error

    def cuPointerGetAttribute(self, value, attribute, address):
        if not 0x10000 <= address.value < 0x11000:
            return 1
        value._obj.value = {device._BUFFER_ID: 77, device._IPC_CAPABLE: self.capable}[attribute]
        return 0

    def cuIpcGetMemHandle(self, handle, base):
        handle[:] = [9] * 64
        return self.error


class DriverTest(unittest.TestCase):
    def setUp(self):
        self.library = FakeLibrary()
        self.driver = device.Driver(self.library)

    def test_facts(self):
        self.assertEqual(self.driver.uuid(2), bytes([42] * 16))
        self.assertEqual(self.driver.allocation(0x10040), (0x10000, 4096, 77))
        self.assertEqual(self.driver.number(0x20000), 0)
        self.assertEqual(self.driver.handle(0x10000), bytes([9] * 64))

    def test_expandable_segments_are_explained(self):
        self.library.capable = 0
        with self.assertRaisesRegex(device.CannotShare, "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False"):
            self.driver.handle(0x10000)

    def test_errors_name_the_function(self):
        self.library.error = 201
        with self.assertRaisesRegex(device.CannotShare, "cuMemGetAddressRange_v2: CUDA driver error 201"):
            self.driver.allocation(0x10000)

    def test_no_library(self):
        with mock.patch.object(ctypes, "CDLL", side_effect=OSError("libcuda.so.1: not found")):
            with self.assertRaisesRegex(device.CannotShare, "libcuda.so.1: not found"):
                device.Driver()

    def test_a_cuda_over_it(self):
        cuda = device.Cuda(self.driver)
        self.assertIsNone(cuda.ordinal(torch.zeros(2)))
        self.assertEqual(cuda.uuid(0), bytes([40] * 16))


if __name__ == "__main__":
    unittest.main()
