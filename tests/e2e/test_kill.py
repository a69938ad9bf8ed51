"""A killed trainer, worker or controller ends the job within ten seconds, with a message that says who and what, and
leaves nothing behind."""

import os
import queue
import re
import signal
import sys
import tempfile
import threading
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.abspath(os.path.join(HERE, "..", ".."))
sys.path.insert(0, os.path.join(ROOT, "deploy", "quickstart"))

from job import Job, JobFailed  # noqa: E402

RANKS = 2
START_LIMIT_S = 60
END_LIMIT_S = 10  # the promise
STEPS_BEFORE = 3


def alive(pid):
    """Whether the process runs; one that only waits to be collected does not."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class RunningJob:
    """The job of trainer.py in a thread, known by what it prints."""

    def __init__(self, folder):
        paths = os.pathsep.join([HERE, os.environ["PYTHONPATH"]])
        build = os.environ["BUILD_DIR"]
        self.job = Job(os.path.join(build, "bin"), folder, RANKS, [], ["--threads", "1"],
                       {"PYTHONPATH": paths, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"})
        self.lines = queue.Queue()
        self.output = []
        self.who = {}
        self.failure = None
        self.thread = threading.Thread(target=self._run)

    def _run(self):
        try:
            self.job.run([sys.executable, os.path.join(HERE, "trainer.py")], show=self._take)
        except JobFailed as error:
            self.failure = error

    def _take(self, line):
        self.output.append(line)
        self.lines.put(line)
        return False

    def start(self):
        """Until every rank has said who it is and done some steps."""
        self.thread.start()
        steps = {}
        while len(self.who) < RANKS or len(steps) < RANKS or min(steps.values()) < STEPS_BEFORE:
            try:
                line = self.lines.get(timeout=START_LIMIT_S)
            except queue.Empty:
                raise AssertionError("the job did not get going:\n" + "".join(self.output[-40:])) from None
            found = re.match(r"\[who\] rank (\d+) trainer (\d+) worker (\d+) socket (\S+)", line)
            if found:
                rank, trainer, worker = map(int, found.groups()[:3])
                self.who[rank] = {"trainer": trainer, "worker": worker, "socket": found.group(4)}
            found = re.match(r"\[step\] rank (\d+) (\d+)", line)
            if found:
                steps[int(found.group(1))] = int(found.group(2))

    def ended(self):
        self.thread.join(END_LIMIT_S)
        return not self.thread.is_alive()


class KillTest(unittest.TestCase):
    def kill(self, choose, *messages):
        """Kills the process that `choose` picks from the running job and checks how the job ends."""
        shared_before = set(os.listdir("/dev/shm"))
        with tempfile.TemporaryDirectory(prefix="lrmoe-e2e-") as folder:
            running = RunningJob(folder)
            with running.job:
                running.start()
                os.kill(choose(running), signal.SIGKILL)
                ended = running.ended()
                output = "".join(running.output)
            running.thread.join()
            with open(os.path.join(folder, "controller.log")) as log:
                output += log.read()
        tail = "".join(line for line in output.splitlines(True) if not line.startswith("[step]"))[-6000:]
        self.assertTrue(ended, f"still running after {END_LIMIT_S} s:\n{tail}")
        self.assertIsNotNone(running.failure, f"the job ended as if all were well:\n{tail}")
        for message in messages:
            self.assertRegex(tail, message)
        for rank, who in running.who.items():
            for role in ("trainer", "worker"):
                self.assertFalse(alive(who[role]), f"{role} of rank {rank} still runs:\n{tail}")
            self.assertFalse(os.path.exists(who["socket"]), f"socket of rank {rank} is left: {who['socket']}")
        left = {name for name in os.listdir("/dev/shm") if "lrmoe" in name} - shared_before
        self.assertFalse(left, "shared memory is left")

    def test_trainer(self):
        self.kill(lambda running: running.who[1]["trainer"], r"(?i)rank 1", r"(?i)training process|command")

    def test_worker(self):
        self.kill(lambda running: running.who[1]["worker"], r"(?i)rank 1|signal 9")

    def test_controller(self):
        self.kill(lambda running: running.job.controller_pid, r"(?i)controller")


if __name__ == "__main__":
    unittest.main()
