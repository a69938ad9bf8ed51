"""Sessions: arenas, protocol messages, and workers that go away."""

import gc
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import weakref

import torch

import lrmoe
from lrmoe import protocol
from fake_session import H, FakeSession

HERE = os.path.dirname(os.path.abspath(__file__))


class HandshakeTest(FakeSession):
    def test_the_workers_version_is_known(self):
        worker = self.connect()
        self.layer(worker, load=False)
        self.assertEqual(worker.version, "fake")


class ArenaTest(FakeSession):
    def setUp(self):
        super().setUp()
        worker = self.connect()
        self.layer(worker, load=False)
        self.pool = worker._tensors()

    def place(self, tensor):
        descriptor = self.pool.descriptor(tensor)
        return descriptor.arena, descriptor.offset_bytes

    def test_places_are_aligned_and_apart(self):
        tensors = [self.pool.empty((n, 3), torch.bfloat16) for n in (1, 7, 64, 1000, 1)]
        for index, tensor in enumerate(tensors):
            tensor.fill_(index)
            self.assertEqual(tensor.data_ptr() % 64, 0)
        for index, tensor in enumerate(tensors):
            self.assertTrue(bool((tensor == index).all()))
        self.assertEqual(len(set(map(self.place, tensors))), len(tensors))

    def test_place_is_free_when_the_storage_dies(self):
        tensor = self.pool.empty((100,), torch.float32)
        view, place = tensor[10:20], self.place(tensor)
        del tensor
        self.assertNotEqual(self.place(self.pool.empty((100,), torch.float32)), place)
        del view
        self.assertEqual(self.place(self.pool.empty((100,), torch.float32)), place)

    def test_random_use_never_overlaps_and_does_not_grow_for_ever(self):
        import random
        chooser, live, limit = random.Random(11), [], 40 << 20
        for number in range(3000):
            if live and (chooser.random() < 0.5 or sum(t.numel() for t, _ in live) * 4 > 8 << 20):
                tensor, value = live.pop(chooser.randrange(len(live)))
                self.assertTrue(bool((tensor == value).all()))
            else:
                tensor = self.pool.empty((chooser.randrange(1, 300000),), torch.int32).fill_(number)
                live.append((tensor, number))
            tensor = None
        self.assertLess(self.pool.num_bytes, limit)

    def test_larger_than_an_arena(self):
        tensor = self.pool.empty((20 << 20,), torch.uint8)
        self.assertEqual(self.pool.descriptor(tensor).shape[0], 20 << 20)

    def test_strangers(self):
        with self.assertRaises(ValueError):
            self.pool.descriptor(torch.zeros(4))
        with self.assertRaises(ValueError):
            self.pool.descriptor(self.pool.empty((4, 4), torch.float32).t())
        with self.assertRaisesRegex(lrmoe.Error, "float64"):
            self.pool.empty((4,), torch.float64)


class ProtocolTest(unittest.TestCase):
    def test_every_method_of_the_service(self):
        self.assertIn("Forward", protocol.METHODS)
        self.assertEqual(protocol.METHODS["Forward"].path, "/lrmoe.v1.Worker/Forward")
        self.assertTrue(protocol.METHODS["Attach"].server_streaming)
        request = protocol.ForwardRequest(session=3, x=protocol.Tensor(shape=[2, 3], dtype=protocol.DATA_TYPE_BF16))
        self.assertEqual(protocol.ForwardRequest.FromString(request.SerializeToString()), request)


class LostWorkerTest(FakeSession):
    def test_no_worker(self):
        with self.assertRaisesRegex(lrmoe.WorkerLost, "does not exist"):
            lrmoe.connect(self.socket + ".none", connect_timeout=0.05)
        with self.assertRaisesRegex(ValueError, "LRMOE_SOCKET"):
            os.environ.pop("LRMOE_SOCKET", None)
            lrmoe.connect()

    def test_ended_epoch(self):
        layer = self.layer(self.connect())
        layer(*self.batch(2))
        self.fake.ended.set()
        layer._worker._connection._ended.wait(10)
        with self.assertRaisesRegex(lrmoe.WorkerLost, "rank 1 was lost"):
            layer(*self.batch(2))

    def test_deadline(self):
        layer = self.layer(self.connect(call_timeout=2))
        layer(*self.batch(1))
        with self.fake.lock:
            with self.assertRaisesRegex(lrmoe.Error, "DEADLINE_EXCEEDED") as raised:
                layer(*self.batch(2))
        self.assertNotIsInstance(raised.exception, lrmoe.WorkerLost)
        layer.eval()
        batches = [self.batch(n) for n in (3, 4, 5)]
        for x, ids, alpha in batches:  # the late answer is nobody's
            self.assertEqual(layer(x, ids, alpha).shape, x.shape)
            self.assertEqual(layer.last_plan.routed_rows, ids.numel())

    def test_killed_worker(self):
        with tempfile.TemporaryDirectory(prefix="lrmoe-test-") as folder:
            socket = os.path.join(folder, "worker.sock")
            process = subprocess.Popen([sys.executable, os.path.join(HERE, "fake_worker.py"), socket])
            try:
                worker = lrmoe.connect(socket)
                layer = self.layer(worker)
                layer(*self.batch(2)).sum().backward()
                # Killed while a call waits for an answer that never comes.
                process.send_signal(signal.SIGSTOP)
                self.assertTrue(os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1]))
                killer = threading.Timer(0.2, process.kill)
                killer.start()
                with self.assertRaises(lrmoe.WorkerLost):
                    layer(*self.batch(2))
                self.assertLessEqual(process.wait(10), 0)
                with self.assertRaises(lrmoe.WorkerLost):
                    lrmoe.AdamW(worker).step()
                worker.close()
            finally:
                process.kill()
                process.wait()

    def test_session_is_freed(self):
        worker = self.connect()
        layer = self.layer(worker)
        layer(*self.batch(2)).sum().backward()
        reference = weakref.ref(worker)
        worker.close()
        self.doCleanups()
        del worker, layer
        gc.collect()
        self.assertIsNone(reference())


class InstallTest(unittest.TestCase):
    @unittest.skipUnless(shutil.which("protoc"), "protoc is not on PATH")
    def test_wheel_is_complete(self):
        source = os.path.join(HERE, "..", "..")
        with tempfile.TemporaryDirectory(prefix="lrmoe-test-") as folder:
            for part in ("tools/python", "proto"):
                shutil.copytree(os.path.join(source, part), os.path.join(folder, part))
            built = os.path.join(folder, "built")
            subprocess.run([sys.executable, "setup.py", "-q", "build", "--build-lib", built],
                           cwd=os.path.join(folder, "tools/python"), check=True, capture_output=True)
            environment = {**os.environ, "PYTHONPATH": built}
            subprocess.run([sys.executable, "-c", "import lrmoe; print(lrmoe.protocol.METHODS)"], cwd=folder, check=True,
                           env=environment, capture_output=True)


if __name__ == "__main__":
    unittest.main()
