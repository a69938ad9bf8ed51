"""A TestCase with a session to a fake worker in this process.

LRMOE_LANE=0 in the environment runs the tests with every call on gRPC."""

import os
import tempfile
import unittest

import torch

import lrmoe
from fake_worker import FakeLane, FakeWorker, serve

E, K, H, F = 5, 2, 16, 8


class FakeSession(unittest.TestCase):
    retention_rate = 1.0

    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lrmoe-test-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.socket = os.path.join(folder.name, "worker.sock")
        self.fake = FakeWorker(self.retention_rate)
        self.lane = FakeLane(self.fake, self.socket + ".lane")
        self.addCleanup(self.lane.close)
        server = serve(self.fake, self.socket)
        self.addCleanup(lambda: server.stop(None).wait())
        self.generator = torch.Generator().manual_seed(7)

    def connect(self, **options):
        worker = lrmoe.connect(self.socket, **options)
        self.addCleanup(worker.close)
        return worker

    def random(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def layer(self, worker, index=0, dtype=torch.float32, load=True):
        layer = lrmoe.MoELayer(worker, index, E, K, H, F, dtype=dtype)
        if load:
            layer.weights = self.random(E, 2 * F, H) * 0.3, self.random(E, H, F) * 0.3
            layer.load_experts(*layer.weights)
        return layer

    def batch(self, *leading):
        """x, ids, alpha; leaves that need gradients."""
        ids = torch.rand(*leading, E, generator=self.generator).topk(K, dim=-1).indices
        alpha = torch.rand(*leading, K, generator=self.generator) + 0.1
        return self.random(*leading, H).requires_grad_(), ids, alpha.requires_grad_()

    def requests(self, name):
        return [request for method, request in self.fake.calls if method == name]
