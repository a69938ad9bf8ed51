"""Runs jobs of checks one after another and counts them; what every runner of such checks does."""

import tempfile

from job import JobFailed


def run_jobs(jobs, run_job, only):
    """jobs: (name, ...) each; those whose name contains `only` are run. run_job(folder, name, ...) returns how many checks
    passed or raises JobFailed; the folder is the same for all. Prints "N passed, N failed" last. Returns the exit status."""
    passed = failed = 0
    with tempfile.TemporaryDirectory(prefix="lrmoe-checks-") as folder:
        for name, *rest in jobs:
            if only not in name:
                continue
            print(f"== {name}", flush=True)
            try:
                passed += run_job(folder, name, *rest)
            except JobFailed as error:
                failed += 1
                print(f"{name} FAILED: {error}", flush=True)
    print(f"{passed} passed, {failed} failed")
    return 1 if failed or not passed else 0
