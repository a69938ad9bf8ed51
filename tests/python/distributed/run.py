"""Runs the distributed checks: for each, a controller and workers under mpirun, and a training process per rank.

usage: run.py --bin DIR [--ranks N] [--only NAME]; PYTHONPATH names the package. Ends with "N passed, N failed"."""

import argparse
import functools
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.join(HERE, "..", "..", "..", "deploy", "quickstart"))

from job import Job, JobFailed  # noqa: E402
from run_jobs import run_jobs  # noqa: E402


def jobs():
    """(name, program, rates, environment)"""
    for dtype in ("fp32", "bf16"):
        for rate in ("1.0", "0.6"):
            yield f"layer-{dtype}-{rate}", "checks_layer.py", rate, {"CHECK_DTYPE": dtype, "CHECK_RATE": rate}
    yield "layer-bf16-0.6-recompute", "checks_layer.py", "0.6", {
        "CHECK_DTYPE": "bf16", "CHECK_RATE": "0.6", "LRMOE_ACTIVATION_MEMORY": "recompute"}
    fp32 = {"CHECK_DTYPE": "fp32", "CHECK_RATE": "1.0"}
    # Below 1, because scores (and so NaN in them) are only looked at when rows are dropped.
    yield "refusals", "checks_refusals.py", "0.6", {**fp32, "CHECK_RATE": "0.6"}
    yield "adamw", "checks_training.py", "1.0", {**fp32, "CHECK_PHASE": "adamw"}
    # In this order: the second loads what the first saved. Fixed ownership: replicas would depend on the history.
    yield "checkpoint-save", "checks_training.py", "1.0", {**fp32, "CHECK_PHASE": "save"}
    yield "checkpoint-load", "checks_training.py", "1.0", {**fp32, "CHECK_PHASE": "load"}


def run_job(options, folder, name, program, rates, environment):
    """Number of checks that passed. Raises JobFailed."""
    planner = "fixed" if program == "checks_training.py" else "lrmoe"
    paths = [HERE, os.path.dirname(HERE), os.environ.get("PYTHONPATH", "")]
    environment = {**environment, "CHECK_FOLDER": folder, "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo",
                   "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    lines = []
    with Job(options.bin, os.path.join(folder, name), options.ranks, ["--planner", planner, "--rates", rates],
             ["--threads", "1", "--replica-slots", "1"], environment) as job:
        job.run([sys.executable, os.path.join(HERE, program)],
                show=lambda line: lines.append(line) or bool(re.match("(worst|AdamW)", line)))
    for line in lines:
        found = re.match(r"(\d+) checks passed$", line.strip())
        if found:
            return int(found.group(1))
    raise JobFailed("the job ended well but no check was counted:\n" + "".join(lines[-20:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, help="folder of the built programs")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--only", default="", help="run the jobs whose name contains this")
    options = parser.parse_args()
    return run_jobs(jobs(), functools.partial(run_job, options), options.only)


if __name__ == "__main__":
    sys.exit(main())
