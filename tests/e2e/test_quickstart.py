"""A shortened quickstart: both arms learn, summary.json is complete, the plots are there."""

import json
import math
import os
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "..", ".."))
STEPS = 30
FIELDS = {"name", "loss_first", "loss_last", "tokens_per_s", "retention_rate_mean", "imbalance_before", "imbalance_after",
          "routed_rows", "kept_rows", "backward_ms_critical_rank", "peak_bytes_worker_max", "plan_ms_p50"}
PAIRS_PER_STEP = 4 * 4 * 8 * 64  # layers x k x sequences x length, per rank


class QuickstartTest(unittest.TestCase):
    def test_shortened(self):
        with tempfile.TemporaryDirectory(prefix="lrmoe-e2e-") as folder:
            done = subprocess.run(
                [os.path.join(ROOT, "deploy", "quickstart.sh"), "--no-install", "--build-dir", os.environ["BUILD_DIR"],
                 "--python", sys.executable, "--steps", str(STEPS), "--out", folder],
                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
            print(done.stdout)
            path = os.path.join(folder, "summary.json")
            self.assertTrue(os.path.exists(path), done.stdout[-3000:])
            with open(path) as file:
                summary = json.load(file)
            plots = sorted(name for name in os.listdir(folder) if name.endswith(".png"))
        self.assertEqual((summary["ranks"], summary["steps"]), (2, STEPS))
        self.assertEqual([arm["name"] for arm in summary["arms"]], ["full", "lrmoe"])
        for arm in summary["arms"]:
            self.assertLessEqual(FIELDS, set(arm))
            for field in FIELDS - {"name"}:
                self.assertTrue(math.isfinite(arm[field]), field)
            self.assertLess(arm["loss_last"], 0.75 * arm["loss_first"])
            self.assertLess(arm["loss_last"], summary["unigram_entropy"])
            self.assertEqual(arm["routed_rows"], 2 * STEPS * PAIRS_PER_STEP)
            self.assertGreaterEqual(arm["imbalance_before"], 1.0)
            self.assertGreater(arm["backward_ms_critical_rank"], 0)
            self.assertGreater(arm["peak_bytes_worker_max"], 0)
            self.assertGreater(arm["plan_ms_p50"], 0)
        full, compact = summary["arms"]
        self.assertEqual(full["retention_rate_mean"], 1.0)
        self.assertEqual(full["kept_rows"], full["routed_rows"])
        self.assertEqual(full["loss_first"], compact["loss_first"])
        self.assertTrue(0.69 < compact["retention_rate_mean"] < 1.0)
        self.assertLess(compact["kept_rows"], compact["routed_rows"])
        self.assertAlmostEqual(compact["kept_rows"] / compact["routed_rows"], compact["retention_rate_mean"], delta=0.01)
        self.assertLess(abs(compact["loss_last"] / full["loss_last"] - 1), 0.1)
        self.assertEqual(compact["plans_infeasible"], 0)
        self.assertLessEqual(compact["peak_bytes_worker_max"], compact["memory_budget_bytes_per_layer"] * 1.02)
        self.assertLess(compact["memory_budget_bytes_per_layer"], full["peak_bytes_worker_max"])
        self.assertEqual(plots, ["backward_ms.png", "imbalance.png", "kept_rows.png", "loss.png", "peak_bytes.png"])


if __name__ == "__main__":
    unittest.main()
