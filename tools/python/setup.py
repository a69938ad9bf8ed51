"""Adds protocol.desc, the descriptors of the worker protocol, to the package: from grpc_tools or protoc, no compiler."""

import pathlib
import shutil
import subprocess
import sys

from setuptools import setup
from setuptools.command.build_py import build_py

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


class BuildWithDescriptors(build_py):
    def run(self):
        super().run()
        if not PROTO.is_dir():
            raise SystemExit(f"lrmoe: {PROTO} is missing; build from a checkout of the repository")
        folder = HERE / "lrmoe" if getattr(self, "editable_mode", False) else pathlib.Path(self.build_lib) / "lrmoe"
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run([*protoc(), f"-I{PROTO}", "--include_imports", f"--descriptor_set_out={folder / 'protocol.desc'}",
                        "lrmoe/v1/worker.proto"], check=True)


setup(cmdclass={"build_py": BuildWithDescriptors})
