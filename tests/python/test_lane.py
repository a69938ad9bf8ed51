"""The lane: used when it is there, said when it is not."""

import os
import unittest
from unittest import mock

import lrmoe
import lrmoe.protocol
from lrmoe.lane import Lane, LaneFailed
from fake_session import FakeSession


class LaneTest(FakeSession):
    def setUp(self):
        super().setUp()
        patch = mock.patch.dict(os.environ, LRMOE_LANE="1")
        patch.start()
        self.addCleanup(patch.stop)

    def train(self, worker):
        layer = self.layer(worker)
        layer(*self.batch(2)).sum().backward()
        self.assertEqual([name for name, _ in self.fake.calls if name.endswith("ward")], ["Forward", "Backward"])
        return layer

    def test_forward_and_backward_take_it(self):
        worker = self.connect()
        with self.assertLogs("lrmoe", "INFO") as logs:
            self.train(worker)
        self.assertIn("forward and backward go through " + self.fake.lane, logs.output[0])
        self.assertTrue(worker.has_lane)
        self.assertEqual(self.fake.lane_calls, 2)

    def test_none_wanted(self):
        os.environ["LRMOE_LANE"] = "0"
        worker = self.connect()
        with self.assertLogs("lrmoe", "INFO") as logs:
            self.train(worker)
        self.assertIn("LRMOE_LANE is 0", logs.output[0])
        self.assertFalse(worker.has_lane)
        self.assertEqual(self.fake.lane_calls, 0)

    def test_none_there(self):
        for path, text in (("", "has no lane"), (self.socket + ".none", "No such file")):
            with self.subTest(path):
                self.fake.lane = path
                self.fake.calls.clear()
                worker = self.connect()
                with self.assertLogs("lrmoe", "WARNING") as logs:
                    self.train(worker)
                self.assertRegex(logs.output[0], f"through gRPC, which is slower: .*{text}")
                self.assertFalse(worker.has_lane)

    def test_refusals_come_as_over_grpc(self):
        messages = []
        x, ids, alpha = self.batch(2)
        for lane in ("1", "0"):
            os.environ["LRMOE_LANE"] = lane
            layer = self.layer(self.connect())
            with self.assertRaises(lrmoe.Error) as raised:
                layer(x, ids + 100, alpha)
            messages.append((raised.exception.code, raised.exception.message))
        self.assertEqual(*messages)
        self.assertEqual(messages[0][0], "INVALID_ARGUMENT")

    def test_lost_connection(self):
        layer = self.train(self.connect())
        self.lane.close()
        with self.assertRaisesRegex(lrmoe.WorkerLost, "Forward: "):
            layer(*self.batch(2))

    def test_a_socket_that_is_no_lane(self):
        with self.assertRaises(OSError):
            Lane(self.socket, 1)  # gRPC's
        lane = Lane(self.fake.lane, 10)
        lane.close()
        with self.assertRaises(LaneFailed) as raised:
            lane.call("Forward", lrmoe.protocol.ForwardRequest())
        self.assertEqual(raised.exception.code, "UNAVAILABLE")


if __name__ == "__main__":
    unittest.main()
