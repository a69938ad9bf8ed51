"""What `lrmoe-bench layer` prints: the fixed fields, bytes and rows as the plan says.

usage: layer_test.py PATH_OF_LRMOE_BENCH
"""

import json
import subprocess
import sys
import unittest

BENCH = sys.argv.pop(1)
FORWARD = {"plan", "weights", "dispatch", "compute", "return", "total"}
BACKWARD = {"score", "select", "pack", "dispatch", "compute", "return", "gradients", "total"}


def layer(**options):
    arguments = [word for name, value in options.items() for word in ("--" + name.replace("_", "-"), str(value))]
    return subprocess.run([BENCH, "layer", "--output", "json", "--repetitions", "2", *arguments], capture_output=True,
                          text=True, timeout=300)


class LayerTest(unittest.TestCase):
    def run_layer(self, **options):
        result = layer(**options)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def check(self, arm, routed):
        self.assertEqual(set(arm["forward_ms"]), FORWARD)
        self.assertEqual(set(arm["backward_ms"]), BACKWARD)
        for phase in list(arm["forward_ms"].values()) + list(arm["backward_ms"].values()):
            self.assertLessEqual(phase["min"], phase["median"])
            self.assertLessEqual(phase["median"], phase["max"])
        self.assertEqual(arm["rows"]["routed"], routed)
        self.assertTrue(arm["wire_bytes"]["equal"], arm["wire_bytes"])
        self.assertGreater(arm["gflop_per_s"], 0)
        self.assertGreater(arm["peak_gflop_per_s"], 0)
        memory = arm["memory_bytes"]
        self.assertLessEqual(memory["measured"], 1.02 * memory["predicted"])

    def test_every_setting_puts_on_the_wire_what_is_predicted(self):
        for ranks in (1, 2, 3):
            for gradient in ("exact", "retained"):
                for memory in ("save", "recompute"):
                    with self.subTest(ranks=ranks, gradient=gradient, memory=memory):
                        out = self.run_layer(experts=12, top_k=3, hidden=64, intermediate=48, tokens=200, ranks=ranks,
                                             skew=1.0, retention=0.6, router_gradient=gradient,
                                             activation_memory=memory, replica_slots=2, against="fixed")
                        self.check(out, 600 * ranks)
                        self.check(out["against"], 600 * ranks)
                        self.assertEqual(out["rows"]["kept"], 360 * ranks)
                        self.assertEqual(out["against"]["rows"]["kept"], 600 * ranks)
                        self.assertGreater(out["ratios"]["backward_ms"], 0)
                        if ranks > 1:
                            self.assertGreater(out["wire_bytes"]["backward"]["dispatch"]["measured"], 0)
                        if ranks == 3:  # the load of the others happens to be balanced
                            self.assertGreater(out["replicas"], 0)
                            self.assertGreater(out["wire_bytes"]["backward"]["gradients"]["measured"], 0)

    def test_overlap_hides_exchanges_and_changes_no_bytes(self):
        out = self.run_layer(experts=8, top_k=2, hidden=256, intermediate=128, tokens=600, ranks=2, overlap="compare",
                             link_mbit_per_s=400)
        self.check(out, 2400)
        self.check(out["against"], 2400)
        self.assertEqual((out["overlap"], out["against"]["overlap"]), (True, False))
        self.assertEqual(out["wire_bytes"], out["against"]["wire_bytes"])
        self.assertEqual(out["exchanges"].keys(), out["against"]["exchanges"].keys())
        for time in out["exchanges"].values():
            self.assertGreaterEqual(time["under_way_ms"], 0)
            self.assertGreaterEqual(time["hidden"], 0)

    def test_no_rows_are_held_when_gradients_of_replicas_leave(self):
        """With few tokens that is when most memory is used."""
        out = self.run_layer(experts=33, top_k=1, hidden=128, intermediate=64, tokens=100, ranks=2, skew=1.0,
                             retention=0.6, replica_slots=1, activation_memory="recompute", seed=40)
        self.assertGreater(out["wire_bytes"]["backward"]["gradients"]["measured"], 0)
        self.assertLessEqual(out["memory_bytes"]["measured"], out["memory_bytes"]["predicted"])

    def test_a_balanced_load_has_no_reason_for_replicas(self):
        out = self.run_layer(experts=8, top_k=2, hidden=64, intermediate=32, tokens=500, ranks=2, dtype="fp32")
        self.check(out, 2000)
        self.assertLess(out["imbalance"]["before"], 1.05)

    def test_no_tokens(self):
        out = self.run_layer(tokens=0, ranks=2)
        self.assertEqual(out["rows"]["routed"], 0)
        self.assertTrue(out["wire_bytes"]["equal"])

    def test_refusals(self):
        for options in ({"policy": "none"}, {"retention": "0"}, {"top_k": 5, "experts": 4}, {"dtype": "fp16"},
                        {"skew": "nan"}, {"link_mbit_per_s": "nan"}, {"overlap": "compare", "against": "fixed"},
                        {"transport": "mpi", "ranks": 2}, {"transport": "mpi", "link_mbit_per_s": 10}):
            with self.subTest(**options):
                result = layer(**options)
                self.assertEqual(result.returncode, 2)
                self.assertNotEqual(result.stderr, "")


if __name__ == "__main__":
    unittest.main()
