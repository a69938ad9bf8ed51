"""Reproduces the learning results of the paper at a scale this machine trains: three experiments, one command.

    run.py --build-dir build/release [--quick] [--only convergence,criteria,probes,time_to_loss] [--out out/experiments]

convergence: C0, C10, C20, C30 (paper, figure 5); criteria: lrm, grad_norm2, grad_abs, random (table 2), lrm_sampled, and with
--arms corrections of these; probes: the gradients they leave; time_to_loss: processor time of the MoE layers until fixed losses
(table 1). Several seeds, the same weights and data in all arms. Runs that are done are kept: start it again to go on. Ends with
tables, plots and DIR/summary.json.
"""

import argparse
import fcntl
import json
import os
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, as_completed

HERE = os.path.dirname(os.path.abspath(__file__))
QUICKSTART = os.path.join(HERE, "..", "..", "deploy", "quickstart")
sys.path[:0] = [HERE, QUICKSTART]

from job import Job, JobFailed  # noqa: E402
from runs import ARMS, FULL, QUICK, SELECTIONS, all_runs, scaled  # noqa: E402

EXPERIMENTS = ("convergence", "criteria", "probes", "time_to_loss")
PROBE_COST_STEPS = 20  # a run's start-up, in steps, for the estimate of the time left
# Rates Algorithm 1 may choose from in time_to_loss, and its budget's place between what 0.7 and 1.0 need.
TIMED_RATES = "1.0,0.95,0.9,0.85,0.8,0.75,0.7"
TIMED_POSITION = 0.3


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build-dir", required=True)
    parser.add_argument("--out", default="out/experiments")
    parser.add_argument("--quick", action="store_true", help="one seed, few steps: does it run, not what it shows")
    parser.add_argument("--scale", type=float, default=1.0, help="of the full set's steps, 0.05..10 (default 1)")
    parser.add_argument("--only", default=",".join(EXPERIMENTS), help="experiments, separated by commas")
    parser.add_argument("--arms", default=",".join(SELECTIONS),
                        help=f"of criteria and probes, separated by commas, of {','.join(ARMS)} (default: %(default)s)")
    parser.add_argument("--seeds", type=int, help="how many, 1..100")
    parser.add_argument("--parallel", type=int, default=max(1, os.cpu_count() or 1), help="runs of one rank at a time, 1..1024")
    parser.add_argument("--large-text", help="default: prose of Debian's perl-doc")
    parser.add_argument("--small-text", help="default: Python's own documentation")
    options = parser.parse_args()
    if not os.path.exists(os.path.join(options.build_dir, "bin", "lrmoe-worker")):
        parser.error(f"--build-dir: {options.build_dir} has no bin/lrmoe-worker")
    if not 0.05 <= options.scale <= 10:
        parser.error(f"--scale: {options.scale} is not within 0.05..10")
    options.only = set(options.only.split(","))
    if not options.only <= set(EXPERIMENTS):
        parser.error(f"--only: {options.only - set(EXPERIMENTS)} is none of {EXPERIMENTS}")
    options.arms = tuple(options.arms.split(","))
    if not set(options.arms) <= set(ARMS):
        parser.error(f"--arms: {set(options.arms) - set(ARMS)} is none of {tuple(ARMS)}")
    if options.seeds is not None and not 1 <= options.seeds <= 100:
        parser.error(f"--seeds: {options.seeds} is not within 1..100")
    if not 1 <= options.parallel <= 1024:
        parser.error(f"--parallel: {options.parallel} is not within 1..1024")
    return options


class Progress:
    """Prints each finished run with an estimate of the time left, from the steps done so far in this session."""

    def __init__(self, runs, parallel):
        self.total = sum(self.cost(run) for run in runs)
        self.count, self.done_count, self.done, self.parallel = len(runs), 0, 0, parallel
        self.started, self.lock = time.monotonic(), threading.Lock()

    @staticmethod
    def cost(run):
        return PROBE_COST_STEPS + run.steps * run.ranks

    def finished(self, run, text):
        with self.lock:
            self.done += self.cost(run)
            self.done_count += 1
            elapsed = time.monotonic() - self.started
            left = elapsed * (self.total - self.done) / self.done
            print(f"[{self.done_count}/{self.count}] {run.name}: {text}; {elapsed:.0f} s, about {left:.0f} s left", flush=True)


class Experiments:
    def __init__(self, options):
        self.options = options
        self.bin_dir = os.path.join(options.build_dir, "bin")
        self.out = os.path.abspath(options.out)
        self.sizes = (QUICK if options.quick else scaled(FULL, options.scale))._replace(arms=options.arms)
        if options.seeds is not None:
            self.sizes = self.sizes._replace(seeds=tuple(range(1, options.seeds + 1)))
        self.texts = {}

    def prepare(self):
        """Writes the texts; forgets runs made with other sizes."""
        from text import prepare
        os.makedirs(self.out, exist_ok=True)
        self.lock = open(os.path.join(self.out, "lock"), "w")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"another run.py works in {self.out}: wait for it or give another --out") from None
        steps = {name: value for name, value in self.sizes._asdict().items() if name.endswith("_steps")}
        stamp = json.dumps({"steps": steps, "texts": [self.options.large_text, self.options.small_text]})
        path = os.path.join(self.out, "settings.json")
        if os.path.exists(path) and open(path).read() != stamp:
            raise SystemExit(f"{self.out} holds runs with other settings (see settings.json): remove it or give another --out")
        with open(path, "w") as file:
            file.write(stamp)
        small = self.options.small_text
        if not small:
            from pydoc_data import topics
            small = os.path.join(self.out, "topics.txt")
            with open(small, "w") as file:
                file.write("\n\n".join(topics.topics[name] for name in sorted(topics.topics)))
        for name, source in (("large", self.options.large_text), ("small", small)):
            self.texts[name] = os.path.join(self.out, f"{name}.bytes")
            description, size = prepare(source, self.texts[name])
            print(f"{name} text: {size / 1e6:.1f} MB, {description}", flush=True)

    def folder(self, name):
        return os.path.join(self.out, "runs", name)

    def is_done(self, run):
        return os.path.exists(os.path.join(self.folder(run.name), "done"))

    def flags(self, run):
        if run.regime != "timed":  # one rank: the planner has nothing to balance, one rate forces it
            return ["--planner", "lrmoe", "--rates", str(run.retention), *ARMS[run.selection], "--seed", str(run.seed)], []
        if run.planner == "fixed":
            return ["--planner", "fixed", "--rates", "1.0"], ["--replica-slots", "0"]
        limit = self.budget(run)
        return (["--planner", run.planner, "--rates", TIMED_RATES, "--on-infeasible", "best_effort"],
                ["--memory-budget", str(limit), "--replica-slots", "2"])

    def budget(self, run):
        """Bytes per rank in which the full backward pass does not fit, from the demand of the fixed arm's plans."""
        with open(os.path.join(self.folder(f"timed-{run.seed}-fixed"), "plans.json")) as file:
            plans = json.load(file)
        from budget import choose
        shape = {"num_experts": 16, "hidden_size": 128, "intermediate_size": 64, "weight_bytes": 4}
        _, lowest, highest = choose(self.bin_dir, self.folder(run.name), plans, shape, run.ranks, 2, 0.7)
        return 2 * int(lowest + TIMED_POSITION * (highest - lowest))  # two layers

    def execute(self, run):
        folder = self.folder(run.name)
        shutil.rmtree(folder, ignore_errors=True)
        os.makedirs(folder)
        environment = {"PYTHONPATH": os.pathsep.join([os.path.join(os.path.abspath(self.options.build_dir), "python"),
                                                      QUICKSTART]),
                       "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1",
                       "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo")}
        if os.environ.get("LRMOE_PACKAGE"):
            environment["PYTHONPATH"] = os.environ["LRMOE_PACKAGE"] + os.pathsep + environment["PYTHONPATH"]
        command = [sys.executable, os.path.join(HERE, "arm.py"), "--regime", run.regime, "--large-text", self.texts["large"],
                   "--small-text", self.texts["small"], "--out", folder, "--steps", str(run.steps), "--seed", str(run.seed)]
        if run.start:
            command += ["--start", os.path.join(self.folder(run.start), "state.pt")]
        if run.regime == "pretrain" or run.name.startswith("tune") and run.name.endswith("-C0"):
            command.append("--save")
        if run.name.startswith("probe_tuned"):
            command.append("--probe-small")
        controller, worker = self.flags(run)
        with Job(self.bin_dir, folder, run.ranks, controller + ["--plan-history", str(2 * run.steps + 1000)],
                 ["--threads", "1", *worker], environment) as job:
            job.run(command, show=lambda line: False)
            if run.name.endswith("-fixed"):
                steps = sorted({int(i * (run.steps - 1) / 5) for i in range(6)})
                plans = [json.loads(job.lrmoectl("plans", "show", "--step", str(step), "--layer", str(layer), "--output",
                                                 "json")) for step in steps for layer in (0, 1)]
                with open(os.path.join(folder, "plans.json"), "w") as file:
                    json.dump(plans, file)
        with open(os.path.join(folder, "result-0.json")) as file:
            loss = json.load(file).get("validation_loss")
        open(os.path.join(folder, "done"), "w").close()
        return "gradient taken" if loss is None else f"validation loss {loss:.4f}"

    def run(self):
        """Executes what is not done yet: runs of one rank side by side, runs of two ranks one after the other."""
        runs = all_runs(self.sizes, self.options.only)
        todo = [run for run in runs if not self.is_done(run)]
        print(f"{len(runs)} runs, {len(runs) - len(todo)} of them done already", flush=True)
        progress = Progress(todo, self.options.parallel)
        waiting = {run.name: run for run in todo if run.ranks == 1}
        with ThreadPoolExecutor(self.options.parallel) as pool:
            while waiting:
                ready = [run for run in waiting.values() if run.start not in waiting]
                futures = {pool.submit(self.execute, run): run for run in ready}
                for future in as_completed(futures):
                    run = futures[future]
                    progress.finished(run, future.result())
                    del waiting[run.name]
        for run in todo:
            if run.ranks > 1:
                progress.finished(run, self.execute(run))
        return runs


def main():
    options = parse_options()
    # At once: leaving in order would first wait for every run. Jobs end with this process, finished runs are marked.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda signal_number, frame: os._exit(128 + signal_number))
    experiments = Experiments(options)
    try:
        experiments.prepare()
        runs = experiments.run()
    except JobFailed as error:
        print(f"experiments: {error}", file=sys.stderr)
        return 1
    import report
    print(report.write(experiments.out, runs, experiments.sizes, options.only, experiments.bin_dir))
    return 0


if __name__ == "__main__":
    sys.exit(main())
