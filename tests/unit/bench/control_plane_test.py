"""What `lrmoe-bench control-plane` and `compare-pytorch` print.

usage: control_plane_test.py PATH_OF_LRMOE_BENCH
"""

import json
import os
import subprocess
import sys
import unittest

BENCH = sys.argv.pop(1)


def run(*arguments):
    environment = {**os.environ, "LRMOE_PYTHON": os.environ.get("LRMOE_PYTHON", "/usr/bin/python3")}
    return subprocess.run([BENCH, *arguments], capture_output=True, text=True, timeout=250, env=environment)


class ControlPlaneTest(unittest.TestCase):
    def test_round_trips(self):
        for ranks in ("1", "3"):
            done = run("control-plane", "--ranks", ranks, "--invocations", "30", "--tokens", "100", "--output", "json")
            self.assertEqual(done.returncode, 0, done.stderr)
            out = json.loads(done.stdout)
            for field in ("planner_us", "first_plan_us", "round_trip_us"):
                times = out[field]
                self.assertLessEqual(times["min"], times["p50"])
                self.assertLessEqual(times["p50"], times["p99"])
                self.assertLessEqual(times["p99"], times["max"])
            self.assertLessEqual(out["first_plan_us"]["p50"], out["round_trip_us"]["p50"])

    def test_refusals(self):
        self.assertEqual(run("control-plane", "--ranks", "0").returncode, 2)
        done = run("control-plane", "--experts", "4", "--top-k", "5")
        self.assertEqual(done.returncode, 2)
        self.assertIn("top-k is 5; allowed: 1..4", done.stderr)


class ComparePytorchTest(unittest.TestCase):
    def test_the_arms_agree(self):
        for dtype, tolerance in (("fp32", 1e-5), ("bf16", 3e-2)):
            done = run("compare-pytorch", "--arms", "loop,lrmoe", "--experts", "6", "--top-k", "2", "--hidden", "64",
                       "--intermediate", "32", "--tokens", "50", "--repetitions", "2", "--dtype", dtype, "--output", "json")
            self.assertEqual(done.returncode, 0, done.stderr)
            out = json.loads(done.stdout)
            self.assertEqual(set(out["arms"]), {"loop", "lrmoe"})
            self.assertLess(out["arms"]["lrmoe"]["difference_from_loop"], tolerance)
            self.assertGreater(out["times_as_fast"]["loop"]["total_ms"], 0)

    def test_refusals(self):
        for arguments in (("--arms", "none"), ("--experts", "0"), ("--top-k", "17"), ("--dtype", "fp16")):
            done = run("compare-pytorch", *arguments)
            self.assertEqual(done.returncode, 2, done.stderr)
            self.assertIn(arguments[0], done.stderr)


if __name__ == "__main__":
    unittest.main()
