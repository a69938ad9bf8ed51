"""lrmoe-sim from the outside: a generated trace through every policy, fixed JSON fields, plots, exit statuses.

usage: command_test.py PATH_OF_LRMOE_SIM
"""

import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

SIM = sys.argv.pop(1)


def sim(*arguments):
    return subprocess.run([SIM, *map(str, arguments)], capture_output=True, text=True, timeout=300)


class CommandTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def ok(self, *arguments):
        result = sim(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stderr, "")
        return result.stdout

    def fails(self, status, part, *arguments):
        result = sim(*arguments)
        self.assertEqual(result.returncode, status, result.stderr)
        self.assertIn(part, result.stderr)
        self.assertEqual(result.stdout, "")

    def trace(self, workload="zipf:1.0", steps=6):
        path = self.folder / "trace.jsonl"
        path.write_text(self.ok("generate", "--workload", workload, "--experts", 16, "--ranks", 4, "--tokens", 100,
                                "--top-k", 2, "--steps", steps, "--seed", 3, "--layers", 2))
        return path

    def test_a_generated_trace_through_every_policy(self):
        trace = self.trace()
        self.assertEqual(trace.read_text(), self.trace().read_text())
        out = json.loads(self.ok("replay", "--trace", trace, "--policies", "all", "--output", "json",
                                 "--plot", self.folder / "replay.svg"))
        self.assertEqual(list(out)[:4], ["trace", "ranks", "replica_slots", "policies"])
        self.assertEqual((out["ranks"], out["sources"]), (4, ""))
        names = [policy["policy"] for policy in json.loads(self.ok("policies", "--output", "json"))]
        self.assertEqual([policy["policy"] for policy in out["policies"]], names)
        for policy in out["policies"]:
            self.assertEqual(policy["invocations"], 12)
            self.assertEqual(set(policy["imbalance_forward"]), {"mean", "p95", "max"})
            self.assertEqual(set(policy["imbalance_backward"]), {"mean", "p95", "max"})
            self.assertEqual(set(policy["new_replicas"]), {"mean", "max"})
            self.assertEqual(set(policy["retention_rate"]), {"mean", "min"})
            self.assertEqual(set(policy["plan_us"]), {"p50", "p99", "max"})
            self.assertGreaterEqual(policy["imbalance_forward"]["mean"], 1)
        self.assertEqual([policy["policy"] for policy in out["policies"] if policy["moves_owners"]],
                         ["eplb", "symi", "laer", "smartmoe"])
        self.assertIn("</svg>", (self.folder / "replay.svg").read_text())

    def test_the_table_tells_whose_owners_move(self):
        table = self.ok("replay", "--trace", self.trace(), "--policies", "lrmoe,laer,ideal")
        for policy, owners in (("lrmoe", "stay"), ("laer", "move"), ("ideal", "bound")):
            self.assertRegex(table, rf"(?m)^{policy} +{owners} ")

    def test_sources_are_regrouped_and_it_is_said(self):
        out = json.loads(self.ok("replay", "--trace", self.trace(), "--ranks", 2, "--limit", 3, "--output", "json"))
        self.assertEqual((out["ranks"], out["source_ranks"]), (2, 4))
        self.assertIn("merged evenly into 2", out["sources"])
        self.assertEqual(out["policies"][0]["invocations"], 3)
        self.assertIn("split evenly into 8", self.ok("replay", "--trace", self.trace(), "--ranks", 8))

    def test_figures(self):
        paper = {"fig6": ("paper_percent_at_20x", 58.4), "fig7": ("paper_gib", 8.03), "fig8": ("paper_ms", 16.41)}
        for figure, (field, value) in paper.items():
            with self.subTest(figure=figure):
                plot = self.folder / f"{figure}.svg"
                out = json.loads(self.ok(figure, "--policies", "lrmoe,ultraep,moonep", "--seeds", 1, "--plot", plot,
                                         "--output", "json"))
                self.assertEqual([policy[field] for policy in out["policies"]][1:], [value, None])
                self.assertGreater(len(out["assumptions"]), 5)
                self.assertIn("</svg>", plot.read_text())
                self.assertIn("assumptions\n- ", self.ok(figure, "--policies", "fixed", "--seeds", 1))

    def test_refusals(self):
        trace = self.trace()
        broken = self.folder / "broken.jsonl"
        broken.write_text(trace.read_text()[:-30])
        self.fails(1, "is truncated after", "replay", "--trace", broken)
        self.fails(1, "11 invocations were read", "replay", "--trace", broken)
        self.fails(1, "cannot open", "replay", "--trace", self.folder / "none")
        self.fails(1, "policy is \"none\"; allowed: lrmoe", "replay", "--trace", trace, "--policies", "none")
        self.fails(1, "ends in .svg or .png", "replay", "--trace", trace, "--plot", "plot.gif")
        self.fails(1, "workload is \"W9\"", "generate", "--workload", "W9")
        self.fails(1, "top_k is 17; allowed: 1..16", "generate", "--workload", "W0", "--experts", 16, "--top-k", 17)
        self.fails(2, "--trace", "replay")
        self.fails(2, "--policies", "fig6", "--policies", "none")


if __name__ == "__main__":
    unittest.main()
