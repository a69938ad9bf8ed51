"""Runs both arms of the quickstart and reports. Started by deploy/quickstart.sh; --help shows its options."""

import argparse
import json
import os
import platform
import shutil
import signal
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
REPLICA_SLOTS = 2
# The training program's model; train.py's defaults.
SHAPE = {"num_layers": 4, "num_experts": 16, "hidden_size": 256, "intermediate_size": 128}


def within(kind, low, high):
    def parse(text):
        value = kind(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text} is not within {low}..{high}")
        return value
    return parse


def parse_options():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=within(int, 2, 16), default=2)
    parser.add_argument("--steps", type=within(int, 10, 100000), default=200)
    parser.add_argument("--min-retention", type=within(float, 0.1, 0.95), default=0.7)
    parser.add_argument("--text", help="text to learn; default: prose of Debian's perl-doc")
    parser.add_argument("--out", default="out/quickstart")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--seed", type=within(int, 0, 10**6), default=1)
    parser.add_argument("--build-dir", required=True)
    return parser.parse_args()


def rates(lowest):
    """Candidate retention rates: 1.0, 0.95, ... and the lowest."""
    values = [1.0]
    while values[-1] - 0.05 > lowest + 1e-9:
        values.append(round(values[-1] - 0.05, 2))
    return values + [lowest]


class Quickstart:
    def __init__(self, options):
        self.options = options
        self.bin_dir = os.path.join(options.build_dir, "bin")
        self.out = os.path.abspath(options.out)
        self.text = os.path.join(self.out, "text.bytes")
        self.threads = max(1, (os.cpu_count() or 1) // options.ranks)
        self.environment = {
            "PYTHONPATH": os.path.join(os.path.abspath(options.build_dir), "python"),
            "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(self.threads), "OPENBLAS_NUM_THREADS": str(self.threads),
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        }

    def prepare(self):
        """Checks what is needed, writes the text, prints where we are. Returns the text's unigram entropy."""
        import torch

        from text import Text, prepare
        for program in ("lrmoe-controller", "lrmoe-worker", "lrmoectl", "lrmoe-sim"):
            if not os.path.exists(os.path.join(self.bin_dir, program)):
                raise SystemExit(f"quickstart: {self.bin_dir}/{program} is not built")
        if shutil.which("mpirun") is None:
            raise SystemExit("quickstart: no mpirun on PATH")
        shutil.rmtree(self.out, ignore_errors=True)
        os.makedirs(self.out)
        description, num_bytes = prepare(self.options.text, self.text)
        entropy = Text(self.text).unigram_entropy()
        print(f"{self.options.ranks} ranks, {os.cpu_count()} cores ({platform.machine()}), Python "
              f"{platform.python_version()}, PyTorch {torch.__version__}, experts in {self.options.dtype}\n"
              f"text: {num_bytes / 1e6:.1f} MB, {description}; byte frequencies alone give a loss of {entropy:.3f}",
              flush=True)
        return entropy

    def train(self, job, arm):
        options = self.options
        folder = os.path.join(self.out, arm)
        job.run([sys.executable, os.path.join(HERE, "train.py"), "--text", self.text, "--out", folder, "--arm", arm,
                 "--steps", str(options.steps), "--seed", str(options.seed), "--dtype", options.dtype, "--threads",
                 str(self.threads)],
                show=lambda line: line.startswith("[") and not line.startswith("[20"))

    def job(self, arm, controller_flags, worker_flags):
        from job import Job
        history = self.options.steps * SHAPE["num_layers"] + 1000
        return Job(self.bin_dir, os.path.join(self.out, arm), self.options.ranks,
                   [*controller_flags, "--plan-history", str(min(history, 1 << 20))],
                   ["--threads", str(self.threads), *worker_flags], self.environment)

    def full_arm(self):
        """Every row kept, experts where they are. Returns plans of it, spread over the run."""
        print(f"\narm full: planner fixed, every row kept, {self.options.steps} steps", flush=True)
        with self.job("full", ["--planner", "fixed", "--rates", "1.0"], ["--replica-slots", "0"]) as job:
            self.train(job, "full")
            steps = sorted({int(i * (self.options.steps - 1) / 5) for i in range(6)})
            return [json.loads(job.lrmoectl("plans", "show", "--step", str(step), "--layer", str(layer), "--output",
                                            "json")) for step in steps for layer in range(SHAPE["num_layers"])]

    def lrmoe_arm(self, budget):
        """The planned, compact backward under the budget. Returns what lrmoectl says of it, and the
        number of plans that did not fit."""
        options = self.options
        print(f"\narm lrmoe: Algorithm 1, rates {', '.join(map(str, rates(options.min_retention)))}; "
              f"{budget / 2**20:.2f} MiB per rank and layer, {REPLICA_SLOTS} replica slots", flush=True)
        # The budget is a margin above what the sampled demand needs at the lowest rate; a step that needs more still runs,
        # at that rate, and counts as infeasible.
        flags = ["--planner", "lrmoe", "--rates", ",".join(map(str, rates(options.min_retention))),
                 "--on-infeasible", "best_effort"]
        total = budget * SHAPE["num_layers"]
        with self.job("lrmoe", flags, ["--memory-budget", str(total), "--replica-slots", str(REPLICA_SLOTS)]) as job:
            self.train(job, "lrmoe")
            last = str(options.steps - 1)
            shown = []
            for command in (["status"], ["layers"], ["plans", "list", "--from-step", last, "--to-step", last],
                            ["plans", "explain", "--step", last, "--layer", "0"]):
                shown.append(f"$ lrmoectl {' '.join(command)}\n{job.lrmoectl(*command)}")
            return "\n".join(shown), json.loads(job.lrmoectl("status", "--output", "json"))["plans_infeasible"]

    def run(self):
        import budget
        import plots
        import report
        options = self.options
        started = time.monotonic()
        entropy = self.prepare()
        shape = {**SHAPE, "weight_bytes": {"fp32": 4, "bf16": 2}[options.dtype]}
        plans = self.full_arm()
        limit, lowest, highest = budget.choose(self.bin_dir, self.out, plans, shape, options.ranks, REPLICA_SLOTS,
                                               options.min_retention)
        print(f"\nmemory per rank and layer: {highest / 2**20:.2f} MiB with every row kept and perfectly balanced, "
              f"{lowest / 2**20:.2f} MiB at retention {options.min_retention}; the budget is {limit / 2**20:.2f} MiB")
        shown, infeasible = self.lrmoe_arm(limit)
        arms = [report.read_arm(name, os.path.join(self.out, name), options.ranks) for name in ("full", "lrmoe")]
        summary = {
            "ranks": options.ranks, "steps": options.steps,
            "arms": [report.summarize(arms[0], options.ranks,
                                      {"memory_budget_bytes_per_layer": None, "plans_infeasible": 0}),
                     report.summarize(arms[1], options.ranks,
                                      {"memory_budget_bytes_per_layer": limit, "plans_infeasible": infeasible})],
            "unigram_entropy": entropy, "seed": options.seed, "dtype": options.dtype, "cores": os.cpu_count(),
            "wall_s": time.monotonic() - started,
        }
        with open(os.path.join(self.out, "summary.json"), "w") as file:
            json.dump(summary, file, indent=2)
            file.write("\n")
        with open(os.path.join(self.out, "lrmoectl.txt"), "w") as file:
            file.write(shown)
        paths = plots.plot_all(arms, entropy, limit, self.out)
        passed, sentences = report.verdict(summary)
        print("", shown, report.table(summary), "", *sentences, sep="\n")
        if self.threads * options.ranks > (os.cpu_count() or 1) or (os.cpu_count() or 1) <= options.ranks:
            print("\nRanks share cores here, so wall time shows little of the balance: compare rows and processor time.")
        print(f"\n{os.path.join(self.out, 'summary.json')}", *paths, sep="\n")
        return 0 if passed else 1


def main():
    options = parse_options()
    # Turn signals into exceptions, so that `with Job` ends the job's processes.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(128 + number))
    from budget import NoBudget
    from job import JobFailed
    try:
        return Quickstart(options).run()
    except (JobFailed, NoBudget) as error:
        print(f"quickstart: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("quickstart: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
