"""pip install of the package: from a checkout and from a source distribution, without a compiler."""

import glob
import os
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
CODE = "import lrmoe, lrmoe.protocol as p; print(lrmoe.__file__, lrmoe.__version__, p.VERSION, len(p.METHODS))"


class Package(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory(prefix="lrmoe-package-")
        self.addCleanup(folder.cleanup)
        self.folder = folder.name
        self.checkout = os.path.join(self.folder, "checkout")
        for part in ("tools/python", "proto"):
            shutil.copytree(os.path.join(ROOT, part), os.path.join(self.checkout, part))
        # No compiler to be found; protoc may be.
        self.environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false", "PYTHONPATH": ""}

    def run_in(self, folder, *command):
        done = subprocess.run(command, cwd=folder, env=self.environment, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def install(self, source):
        target = os.path.join(self.folder, "installed")
        # Offline: what the package needs is here already.
        self.run_in(self.folder, sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation",
                    "--no-index", "--target", target, source)
        self.environment["PYTHONPATH"] = target
        where, version, protocol, methods = self.run_in(self.folder, sys.executable, "-c", CODE).split()
        self.assertTrue(where.startswith(target))
        self.assertEqual((version, protocol, int(methods) > 10), ("0.1.0", "1", True))

    def test_from_a_checkout(self):
        self.install(os.path.join(self.checkout, "tools", "python"))

    def test_from_a_source_distribution(self):
        package = os.path.join(self.checkout, "tools", "python")
        self.run_in(package, sys.executable, "setup.py", "--quiet", "sdist")
        archive, = glob.glob(os.path.join(package, "dist", "*.tar.gz"))
        moved = shutil.copy(archive, self.folder)
        shutil.rmtree(self.checkout)
        self.environment["PATH"] = "/nonexistent"  # no protoc either
        self.install(moved)


if __name__ == "__main__":
    unittest.main()
