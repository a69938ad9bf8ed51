"""What `lrmoe-bench planner` prints: every size and policy, ordered quantiles.

usage: planner_test.py PATH_OF_LRMOE_BENCH
"""

import json
import subprocess
import sys
import unittest

BENCH = sys.argv.pop(1)


def planner(*arguments):
    return subprocess.run([BENCH, "planner", *arguments], capture_output=True, text=True, timeout=300)


class PlannerTest(unittest.TestCase):
    def test_every_size_and_policy(self):
        for residents in ([], ["--residents"]):
            result = planner("--sizes", "16x4,32x8", "--policies", "lrmoe,fixed,eplb", "--repetitions", "7", "--top-k", "2",
                             "--output", "json", *residents)
            self.assertEqual(result.returncode, 0, result.stderr)
            sizes = json.loads(result.stdout)["sizes"]
            self.assertEqual([(size["experts"], size["ranks"]) for size in sizes], [(16, 4), (32, 8)])
            for size in sizes:
                self.assertEqual([policy["policy"] for policy in size["policies"]], ["lrmoe", "fixed", "eplb"])
                for policy in size["policies"]:
                    self.assertEqual(policy["problems"], 7)
                    for clock in ("cpu_us", "wall_us"):
                        self.assertGreater(policy[clock]["p50"], 0)
                        self.assertLessEqual(policy[clock]["p50"], policy[clock]["p99"])
                        self.assertLessEqual(policy[clock]["p99"], policy[clock]["max"])
                self.assertLessEqual(size["policies"][0]["imbalance_mean"], size["policies"][1]["imbalance_mean"])

    def test_refusals(self):
        for status, part, arguments in ((1, "size is \"8x\"", ["--sizes", "8x"]), (1, "workload is \"W9\"", ["--workloads", "W9"]),
                                        (1, "top_k is 9; allowed: 1..8", ["--sizes", "8x2", "--top-k", "9"]),
                                        (2, "--policies", ["--policies", "none"])):
            with self.subTest(part=part):
                result = planner(*arguments)
                self.assertEqual(result.returncode, status)
                self.assertIn(part, result.stderr)


if __name__ == "__main__":
    unittest.main()
