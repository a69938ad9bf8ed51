"""Adds protocol.desc, the descriptors of the worker protocol, to the package: from grpc_tools or protoc, no compiler.

A source distribution carries it and needs neither."""

import pathlib
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = pathlib.Path(__file__).resolve().parent
PROTO = HERE.parent.parent / "proto"


def protoc():
    try:
        import grpc_tools.protoc  # noqa: F401
        return [sys.executable, "-m", "grpc_tools.protoc"]
    except ImportError:
        found = shutil.which("protoc")
        if found is None:
            raise SystemExit("lrmoe: building needs the grpcio-tools package or protoc on PATH "
                             "(Debian: protobuf-compiler)")
        return [found]


def describe(folder):
    """Writes protocol.desc to the folder of the package."""
    target, shipped = folder / "protocol.desc", HERE / "lrmoe" / "protocol.desc"
    folder.mkdir(parents=True, exist_ok=True)
    if PROTO.is_dir():
        subprocess.run([*protoc(), f"-I{PROTO}", "--include_imports", f"--descriptor_set_out={target}",
                        "lrmoe/v1/worker.proto"], check=True)
    elif not shipped.is_file():
        raise SystemExit(f"lrmoe: neither {PROTO} nor {shipped} is there; build from a checkout or a source distribution")
    elif target != shipped:
        shutil.copy(shipped, target)


class BuildWithDescriptors(build_py):
    def run(self):
        super().run()
        describe(HERE / "lrmoe" if getattr(self, "editable_mode", False) else pathlib.Path(self.build_lib) / "lrmoe")


class SourceWithDescriptors(sdist):
    def make_release_tree(self, base_dir, files):
        super().make_release_tree(base_dir, files)
        describe(pathlib.Path(base_dir) / "lrmoe")


setup(cmdclass={"build_py": BuildWithDescriptors, "sdist": SourceWithDescriptors})
