"""What lrmoectl shows before and after the controller was restarted on one --state-dir, ended in order and killed. The
control-plane benchmark stands in for the workers of a job.

usage: restart.py BIN_DIR
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BIN = ""
LIMIT_S = 120  # of a machine under load


class Controller:
    """One run of lrmoe-controller on a state directory. Use as a context."""

    def __init__(self, folder, *flags):
        self.port_file = os.path.join(folder, "port")
        if os.path.exists(self.port_file):
            os.unlink(self.port_file)
        self.log = open(os.path.join(folder, "log"), "w+")
        self.process = subprocess.Popen(
            [os.path.join(BIN, "lrmoe-controller"), "--listen", "127.0.0.1:0", "--port-file", self.port_file,
             "--state-dir", os.path.join(folder, "state"), *flags], stdout=self.log, stderr=subprocess.STDOUT)

    def __enter__(self):
        limit = time.monotonic() + LIMIT_S
        while not os.path.exists(self.port_file):
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < limit, "the controller did not start"
            time.sleep(0.01)
        with open(self.port_file) as file:
            self.address = file.read().strip()
        return self

    def __exit__(self, *_):
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()

    def text(self):
        self.log.flush()
        with open(self.log.name) as file:
            return file.read()

    def end(self, how):
        self.process.send_signal(how)
        return self.process.wait(timeout=LIMIT_S)

    def job(self, invocations):
        subprocess.run([os.path.join(BIN, "lrmoe-bench"), "control-plane", "--controller", self.address, "--ranks", "2",
                        "--experts", "8", "--top-k", "2", "--tokens", "64", "--invocations", str(invocations)],
                       check=True, stdout=subprocess.DEVNULL, timeout=LIMIT_S)

    def ctl(self, *arguments):
        result = subprocess.run([os.path.join(BIN, "lrmoectl"), "--controller", self.address, *arguments],
                                capture_output=True, text=True, timeout=LIMIT_S)
        assert result.returncode == 0, (arguments, result.stderr)
        return result.stdout

    def asked(self, *arguments):
        return json.loads(self.ctl(*arguments, "--output", "json"))

    def written(self):
        """Waits until nothing is on its way to the disk; its status."""
        limit = time.monotonic() + LIMIT_S
        while True:
            status = self.asked("status")
            if status["state_dir"]["waiting"] == 0:
                return status
            assert time.monotonic() < limit, status
            time.sleep(0.01)

    def answers(self):
        """All that must outlive the controller."""
        status = self.written()
        return {
            "status": {name: status[name] for name in ("epoch", "model", "plans_made", "plans_infeasible", "plan_us",
                                                       "current_step", "ranks_expected", "state_dir")},
            "layers": self.asked("layers"),
            "policy": self.asked("policy", "get"),
            "list": self.asked("plans", "list", "--limit", "500"),
            "show": self.asked("plans", "show", "--step", "30", "--layer", "0"),
            "explain": self.asked("plans", "explain", "--step", "30", "--layer", "0"),
            "diff": self.asked("plans", "diff", "3:0", "40:0"),
            "simulate": self.without_time(self.asked("simulate", "--step", "30", "--layer", "0", "--ranks", "4")),
            "trace": self.ctl("trace", "export", "--file", "-"),
        }

    @staticmethod
    def without_time(answer):
        answer["simulated"].pop("plan_us", None)
        return answer


class Restart(unittest.TestCase):
    maxDiff = 2000

    def setUp(self):
        self.folder = tempfile.TemporaryDirectory(prefix="lrmoe-restart-")
        self.addCleanup(self.folder.cleanup)

    def start(self, *flags):
        return Controller(self.folder.name, *flags)

    def test_answers_outlive_the_controller(self):
        with self.start() as controller:
            controller.job(50)
            controller.ctl("policy", "set", "retention_floor=0.25", "seed=7")
            before = controller.answers()
            self.assertEqual(before["status"]["state_dir"]["lost"], 0)
            self.assertEqual(before["status"]["plans_made"], 70)
            ended = controller.asked("status")["epoch_state"]
            self.assertEqual(controller.end(signal.SIGTERM), 0)
        with self.start() as controller:
            self.assertEqual(controller.answers(), before)
            self.assertEqual(controller.asked("status")["epoch_state"], ended)
            self.assertIn("policy seed is 7, as it was last set at run time; the setting still says 0", controller.text())
            controller.end(signal.SIGKILL)
        with self.start() as controller:
            self.assertEqual(controller.answers(), before)
            controller.job(10)
            status = controller.written()
            self.assertEqual(status["plans_made"], 100)
            self.assertGreater(status["epoch"], before["status"]["epoch"])
            controller.end(signal.SIGKILL)
        with self.start("--plan-history", "5", "--seed", "9") as controller:
            self.assertEqual(controller.asked("status")["plans_made"], 100)
            self.assertEqual(len(controller.asked("plans", "list")["plans"]), 5)
            policy = controller.asked("policy", "get")
            self.assertEqual((str(policy["seed"]), float(policy["retention_floor"])), ("9", 0.25))
            self.assertIn("policy seed is 9: the setting was changed from 0, which undoes 7", controller.text())
            self.assertEqual(controller.end(signal.SIGINT), 0)

    def test_refusals(self):
        with self.start() as first:
            second = self.start()
            self.assertEqual(second.process.wait(timeout=LIMIT_S), 1)
            self.assertIn(f"another lrmoe-controller uses it (pid {first.process.pid} on ", second.text())
            second.log.close()
            self.assertEqual(first.end(signal.SIGTERM), 0)
        database = os.path.join(self.folder.name, "state", "lrmoe.db")
        with open(database, "r+b") as file:
            file.truncate(5000)
        broken = self.start()
        self.assertEqual(broken.process.wait(timeout=LIMIT_S), 1)
        self.assertIn(f"{database} is damaged", broken.text())
        broken.log.close()
        self.assertEqual(os.path.getsize(database), 5000)


if __name__ == "__main__":
    BIN = os.path.abspath(sys.argv.pop(1))
    unittest.main()
