"""Runs the framework checks: for each family, a controller and workers under mpirun, and a training process per rank.

usage: run.py --bin DIR [--ranks N ...] [--only NAME]; PYTHONPATH names the package, the Python that runs this has
transformers. Ends with "N passed, N failed"."""

import argparse
import functools
import importlib.util
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.join(HERE, "..", "..", "deploy", "quickstart"), os.path.join(HERE, "..", "python", "distributed")]

from job import Job, JobFailed  # noqa: E402
from run_jobs import run_jobs  # noqa: E402

OWN_MODEL = os.path.join(HERE, "..", "..", "tools", "python", "examples", "own_model.py")
CHECKPOINTS = os.path.join(HERE, "..", "python", "distributed", "checks_training.py")
FAMILIES = ("qwen3_moe", "glm4_moe", "mixtral", "olmoe", "deepseek_v3")


def jobs(ranks):
    """(name, program, ranks, environment)"""
    for count in ranks:
        for family in FAMILIES:
            yield f"parity-{family}-{count}", "checks_parity.py", count, {"CHECK_FAMILY": family}
        if importlib.util.find_spec("megatron"):
            yield f"megatron-{count}", "checks_megatron.py", count, {}
    yield "bf16", "checks_bf16.py", 2, {}
    yield "own-model", OWN_MODEL, 2, {}
    # Here the safetensors library itself opens what a checkpoint wrote.
    yield "checkpoint", CHECKPOINTS, 2, {"CHECK_PHASE": "save"}
    # In this order: the second resumes what the first saved.
    for phase in ("through", "resumed"):
        yield f"trainer-{phase}", "checks_trainer.py", 2, {"CHECK_PHASE": phase}


def run_job(options, folder, name, program, ranks, environment):
    """Number of checks that passed. Raises JobFailed."""
    root = os.path.join(HERE, "..", "..")
    paths = [HERE, os.path.join(root, "tests", "python", "distributed"),
             os.path.join(root, "tools", "python", "examples"), os.environ.get("PYTHONPATH", "")]
    environment = {**environment, "CHECK_DTYPE": "fp32", "CHECK_RATE": "1.0", "CHECK_FOLDER": folder,
                   "PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
                   "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "TRANSFORMERS_OFFLINE": "1",
                   "TOKENIZERS_PARALLELISM": "false"}
    planner = "fixed" if program in ("checks_trainer.py", CHECKPOINTS) else "lrmoe"  # replicas would depend on the history
    lines = []
    with Job(options.bin, os.path.join(folder, name), ranks, ["--planner", planner, "--rates", "1.0"],
             ["--threads", "1", "--replica-slots", "1"], environment) as job:
        try:
            job.run([sys.executable, os.path.join(HERE, program)],
                    show=lambda line: lines.append(line) or line.startswith("worst"))
        except JobFailed:
            first = next((i for i, line in enumerate(lines) if "FAILED" in line or "Error" in line), 0)
            raise JobFailed("".join(lines[first:first + 60])) from None
    for line in lines:
        found = re.search(r"(\d+) checks passed$", line.strip())
        if found:
            return int(found.group(1))
        if program == OWN_MODEL and line.startswith("step 30  loss"):
            return 1
    raise JobFailed("the job ended well but no check was counted:\n" + "".join(lines[-20:]))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bin", required=True, help="folder of the built programs")
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--only", default="", help="run the jobs whose name contains this")
    options = parser.parse_args()
    return run_jobs(jobs(options.ranks), functools.partial(run_job, options), options.only)


if __name__ == "__main__":
    sys.exit(main())
