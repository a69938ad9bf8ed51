"""Runs the end-to-end tests. usage: run.py --build-dir DIR [--only NAME]. Ends with "N passed, N failed"."""

import argparse
import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--build-dir", required=True)
    parser.add_argument("--only", help="run the tests whose name contains this")
    options = parser.parse_args()
    os.environ["BUILD_DIR"] = os.path.abspath(options.build_dir)
    os.environ["PYTHONPATH"] = os.path.join(os.environ["BUILD_DIR"], "python")
    loader = unittest.TestLoader()
    if options.only:
        loader.testNamePatterns = [f"*{options.only}*"]
    result = unittest.TextTestRunner(stream=sys.stdout, verbosity=2).run(loader.discover(HERE))
    failed = len(result.failures) + len(result.errors)
    print(f"{result.testsRun - failed - len(result.skipped)} passed, {failed} failed")
    return 1 if failed or not result.testsRun else 0


if __name__ == "__main__":
    sys.exit(main())
