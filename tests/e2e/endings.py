"""How jobs end: real controller, workers under mpirun and training processes (trainer.cc), one of which is killed, fails
or leaves early. Every time: the job is over within ten seconds, says who and what, has the right exit status, and
leaves no process, socket or shared memory behind.

usage: endings.py BIN_DIR [NAME...]
"""

import glob
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
import unittest

BIN = ""
MARK = "LRMOE_TEST_JOB"
END_LIMIT_S = 10  # the promise
START_LIMIT_S = 120  # of a machine under load


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rsplit(")", 1)[1].split()[1])


def marked_processes(mark):
    """Processes that carry this job's mark in their environment, zombies excluded (they have none)."""
    found = []
    for path in glob.glob("/proc/[0-9]*/environ"):
        try:
            with open(path, "rb") as file:
                if f"{MARK}={mark}".encode() in file.read().split(b"\0"):
                    pid = int(path.split("/")[2])
                    with open(f"/proc/{pid}/cmdline", "rb") as line:
                        found.append((pid, line.read().replace(b"\0", b" ").decode(errors="replace")))
        except (OSError, ValueError):
            pass
    return found


class Job:
    """One job in a directory of its own. Use as a context."""

    def __init__(self, ranks=2, trainer=(), worker=(), launcher=None):
        self.ranks, self.trainer, self.worker = ranks, list(trainer), list(worker)
        self.launcher = ["mpirun", "-n", str(ranks)] if launcher is None else launcher
        self.text = ""
        self.pids = {}
        self.steps = {}
        self.segments = set()  # shared memory files that the workers map

    def __enter__(self):
        self.folder = tempfile.TemporaryDirectory(prefix="lrmoe-e2e-")
        self.run = os.path.join(self.folder.name, "run")
        os.mkdir(self.run, 0o700)
        self.shared = set(os.listdir("/dev/shm"))
        self.mark = os.path.basename(self.folder.name)
        environment = dict(os.environ, XDG_RUNTIME_DIR=self.run, OMPI_ALLOW_RUN_AS_ROOT="1",
                           OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1", OMPI_MCA_mpi_yield_when_idle="1",
                           OMPI_MCA_rmaps_base_oversubscribe="1", OMP_NUM_THREADS="1", **{MARK: self.mark})
        port_file = os.path.join(self.folder.name, "port")
        self.controller_log = open(os.path.join(self.folder.name, "controller.log"), "w+")
        self.controller = subprocess.Popen(
            [os.path.join(BIN, "lrmoe-controller"), "--listen", "127.0.0.1:0", "--ranks", str(self.ranks), "--port-file",
             port_file], stdout=self.controller_log, stderr=subprocess.STDOUT, env=environment)
        limit = time.monotonic() + START_LIMIT_S
        while not os.path.exists(port_file):
            assert self.controller.poll() is None, self.controller_text()
            assert time.monotonic() < limit, "the controller did not start"
            time.sleep(0.01)
        with open(port_file) as file:
            address = file.read().strip()
        self.mpirun = subprocess.Popen(
            [*self.launcher, os.path.join(BIN, "lrmoe-worker"), "--controller", address, "--threads", "1",
             *self.worker, "--", os.path.join(BIN, "lrmoe-test-trainer"), *self.trainer],
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
        os.set_blocking(self.mpirun.stdout.fileno(), False)
        self.selector = selectors.DefaultSelector()
        self.selector.register(self.mpirun.stdout, selectors.EVENT_READ)
        return self

    def __exit__(self, *_):
        for process in (self.mpirun, self.controller):
            if process.poll() is None:
                process.kill()
            process.wait()
        for pid, _ in marked_processes(self.mark):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.mpirun.stdout.close()
        self.controller_log.close()
        self.folder.cleanup()

    def controller_text(self):
        self.controller_log.flush()
        with open(self.controller_log.name) as file:
            return file.read()

    def read(self, seconds):
        """Takes what the job printed; False when it closed its output."""
        if not self.selector.select(seconds):
            return True
        data = self.mpirun.stdout.read()
        if data == b"":
            return False
        self.text += (data or b"").decode(errors="replace")
        for rank, pid in re.findall(r"rank (\d+) pid (\d+)\n", self.text):
            self.pids[int(rank)] = int(pid)
        for rank, step in re.findall(r"rank (\d+) step (\d+)\n", self.text[-4000:]):
            self.steps[int(rank)] = int(step)
        return True

    def wait_for(self, condition, what):
        limit = time.monotonic() + START_LIMIT_S
        while not condition():
            assert time.monotonic() < limit, f"no {what}:\n{self.text[-6000:]}\n{self.controller_text()}"
            assert self.read(1), f"the job ended before {what}:\n{self.text[-6000:]}\n{self.controller_text()}"

    def wait_for_steps(self, number=3):
        self.wait_for(lambda: len(self.steps) == self.ranks and min(self.steps.values()) >= number, f"step {number}")
        for rank in self.pids:
            with open(f"/proc/{self.worker_pid(rank)}/maps") as maps:
                self.segments |= set(re.findall(r"/dev/shm/\S+", maps.read()))

    def janitor(self, rank):
        return parent(self.pids[rank])

    def worker_pid(self, rank):
        return parent(self.janitor(rank))

    def end(self, limit_s=END_LIMIT_S):
        """Waits for the job's end; returns (exit status, seconds)."""
        start = time.monotonic()
        while time.monotonic() < start + limit_s and self.read(0.1):
            pass
        try:
            status = self.mpirun.wait(max(0.1, start + limit_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {limit_s} s:\n{self.text[-6000:]}\n"
                                 f"{self.controller_text()[-3000:]}") from None
        return status, time.monotonic() - start

    def left(self, limit_s):
        """What is left of the job but its controller, when nothing more goes away or the limit is over."""
        limit = time.monotonic() + limit_s
        while True:
            left = [entry for entry in marked_processes(self.mark) if entry[0] != self.controller.pid]
            left += os.listdir(self.run)
            left += [name for name in os.listdir("/dev/shm") if name not in self.shared and "lrmoe" in name]
            left += [path for path in self.segments if os.path.exists(path)]
            if not left or time.monotonic() > limit:
                return left
            time.sleep(0.02)


class Endings(unittest.TestCase):
    def check_end(self, job, statuses, *messages):
        status, seconds = job.end()
        left = job.left(max(0.5, END_LIMIT_S - seconds))
        text = job.text + job.controller_text()
        shown = "\n".join(line for line in text.splitlines() if " step " not in line)[-8000:]
        self.assertIn(status, statuses, shown)
        for message in messages:
            self.assertRegex(text, message)
        self.assertEqual(left, [], f"left behind:\n{shown}")
        print(f"ended in {seconds:.2f} s with status {status}", end=" ", flush=True)

    def test_orderly(self):
        with Job(trainer=["--steps", "5"]) as job:
            status, _ = job.end(START_LIMIT_S)
            self.assertEqual(status, 0, job.text + job.controller_text())
            self.assertIn("finished with all ranks", job.text)
            self.assertNotRegex(job.text, r"(?i)error")
            self.assertEqual(job.left(1), [])

    def test_mistakes_of_one_rank_reach_all_and_end_nothing(self):
        with Job(trainer=["--steps", "5", "--mistakes-step", "3"]) as job:
            status, _ = job.end(START_LIMIT_S)
            self.assertEqual(status, 0, job.text + job.controller_text())
            for mistake in ("step", "layer", "operation", "expert"):
                said = dict(re.findall(r"rank (\d) refused %s: (.+)" % mistake, job.text))
                self.assertEqual(set(said), {"0", "1"}, job.text)
                self.assertEqual(said["0"], said["1"])
                self.assertIn("rank 1", said["0"])
                print(f"{mistake}: {said['0']}", end="; ", flush=True)

    def test_one_rank_without_mpi(self):
        with Job(ranks=1, launcher=[], worker=["--transport", "inproc"], trainer=["--steps", "5"]) as job:
            status, _ = job.end(START_LIMIT_S)
            self.assertEqual(status, 0, job.text + job.controller_text())
            self.assertIn("rank 0 step 5", job.text)
            self.assertEqual(job.left(1), [])

    def test_early_rank_is_no_failure(self):
        """Rank 1 is done while rank 0 still has something else to do."""
        with tempfile.TemporaryDirectory() as folder:
            mark = os.path.join(folder, "go")
            with Job(trainer=["--steps", "3", "--stop-rank", "1", "--stop-step", "3", "--wait-for", mark],
                     worker=["--collective-timeout", "2s"]) as job:
                job.wait_for(lambda: re.search(r"training process of rank 1 .* exited with status 0", job.text), "early end")
                time.sleep(3)  # longer than the collective timeout, which must not apply here
                open(mark, "w").close()
                self.check_end(job, [0], "finished with all ranks")

    def test_rank_leaves_while_others_go_on(self):
        with Job(trainer=["--stop-rank", "1", "--stop-step", "4"]) as job:
            job.wait_for(lambda: re.search(r"training process of rank 1 .* exited with status 0", job.text), "early end")
            self.check_end(job, [9], r"rank 0 error: .*finish", r"training process of rank 0 \(pid \d+\) exited with status 9")

    def test_failed_trainer(self):
        with Job(trainer=["--stop-rank", "1", "--stop-step", "4", "--stop-status", "7"]) as job:
            job.wait_for(lambda: "exited with status 7" in job.text, "the failure")
            self.check_end(job, [7], r"training process of rank 1 \(pid \d+\) exited with status 7")

    def test_killed_trainer(self):
        with Job() as job:
            job.wait_for_steps()
            os.kill(job.pids[1], signal.SIGKILL)
            self.check_end(job, [137], r"training process of rank 1 \(pid %d\) was killed by signal 9" % job.pids[1])
            self.assertRegex(job.controller_text(), r"rank 1.*killed by signal 9")

    def test_killed_worker(self):
        with Job() as job:
            job.wait_for_steps()
            worker = job.worker_pid(1)
            os.kill(worker, signal.SIGKILL)
            self.check_end(job, [137], r"lrmoe-worker\[1\]: worker process %d died" % worker)

    def test_killed_controller(self):
        with Job() as job:
            job.wait_for_steps()
            job.controller.kill()
            self.check_end(job, [4, 9], r"no session with the controller at 127.0.0.1:\d+ for 5.0 s")

    def test_killed_janitor(self):
        with Job() as job:
            job.wait_for_steps()
            janitor = job.janitor(1)
            os.kill(janitor, signal.SIGKILL)
            self.check_end(job, [1], r"the janitor process of rank 1 \(pid %d\) died" % janitor)

    def test_killed_launcher(self):
        with Job() as job:
            job.wait_for_steps()
            job.mpirun.kill()
            self.check_end(job, [-9])

    def test_stopped_launcher(self):
        with Job() as job:
            job.wait_for_steps()
            job.mpirun.terminate()
            status, _ = job.end()
            self.assertNotEqual(status, 0)
            self.assertEqual(job.left(5), [])

    def test_unknown_command(self):
        with Job() as job:
            job.mpirun.kill()
        process = subprocess.run([os.path.join(BIN, "lrmoe-worker"), "--controller", "127.0.0.1:1", "--transport", "inproc",
                                  "--", "/nonexistent/trainer"], capture_output=True, text=True, timeout=60)
        self.assertEqual(process.returncode, 127, process.stderr)
        self.assertIn('cannot start "/nonexistent/trainer": No such file or directory', process.stderr)

    def test_no_controller(self):
        with tempfile.TemporaryDirectory() as run:
            process = subprocess.run([os.path.join(BIN, "lrmoe-worker"), "--controller", "127.0.0.1:1", "--transport",
                                      "inproc", "--controller-timeout", "500ms"], capture_output=True, text=True, timeout=60,
                                     env=dict(os.environ, XDG_RUNTIME_DIR=run))
            self.assertEqual(process.returncode, 4, process.stderr)
            self.assertIn("no session with the controller at 127.0.0.1:1 for 0.5 s", process.stderr)
            self.assertEqual(os.listdir(run), [])

    def test_usage(self):
        for arguments, message in (([], "controller"), (["--controller", "nowhere"], "host:port"),
                                   (["--controller", "h:1", "--device", "tpu"], "allowed: auto, cpu"),
                                   (["--controller", "h:1", "--activation-memory", "forget"], "allowed: save, recompute"),
                                   (["--controller", "h:1", "--frobnicate", "1"], "frobnicate")):
            process = subprocess.run([os.path.join(BIN, "lrmoe-worker"), *arguments], capture_output=True, text=True, timeout=60)
            self.assertEqual(process.returncode, 2, process.stderr)
            self.assertIn(message, process.stderr)

    def test_start_that_fails_on_one_rank(self):
        """A build without NCCL refuses the value before it joins the others; one with it when they wait already."""
        only_last = 'if [ "$OMPI_COMM_WORLD_RANK" = 1 ]; then export LRMOE_TRANSPORT=nccl; fi; exec "$@"'
        with Job(worker=["--device", "cpu"], launcher=["mpirun", "-n", "2", "sh", "-c", only_last, "sh"]) as job:
            self.check_end(job, (1, 2), 'transport is "nccl"')

    def test_devices_that_are_not_there(self):
        """A build without CUDA refuses the value; one with it looks, and says what is missing."""
        for arguments in (["--device", "cuda:1023"], ["--device", "cpu", "--transport", "nccl"]):
            process = subprocess.run([os.path.join(BIN, "lrmoe-worker"), "--controller", "h:1", *arguments],
                                     capture_output=True, text=True, timeout=60)
            self.assertIn(process.returncode, (1, 2), process.stderr)
            self.assertRegex(process.stderr, "built without|no NVIDIA driver|CUDA device|allowed:")


if __name__ == "__main__":
    BIN = os.path.abspath(sys.argv.pop(1))
    unittest.main(argv=[sys.argv[0]] + [f"Endings.test_{name}" for name in sys.argv[1:]], verbosity=2)
