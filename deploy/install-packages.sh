#!/usr/bin/env bash
# deploy/install-packages.sh GROUP...: installs what is missing of Debian 12's packages. Groups:
#   build   compilers and libraries of the C++ programs
#   python  PyTorch, gRPC, NumPy and Matplotlib for /usr/bin/python3
#   tests   what only the tests need
#   frameworks  what the tests with transformers need besides PyPI
#   text    the English text the quickstart learns by default
set -euo pipefail

declare -A groups=(
  [build]="build-essential cmake ninja-build pkg-config libgrpc++-dev protobuf-compiler-grpc libprotobuf-dev
    protobuf-compiler libabsl-dev libspdlog-dev libcli11-dev nlohmann-json3-dev catch2 libopenmpi-dev openmpi-bin
    libdnnl-dev libcairo2-dev libsqlite3-dev"
  # Debian's PyTorch multiplies with whatever libblas is installed: OpenBLAS is ten times the reference BLAS.
  [python]="python3-torch python3-grpcio python3-protobuf python3-numpy python3-matplotlib libopenblas0-pthread"
  [tests]="clang-format"
  [frameworks]="python3-venv"
  [text]="perl-doc"
)

missing=()
for group in "$@"; do
  [ -n "${groups[$group]:-}" ] || { echo "$0: no group \"$group\"; one of ${!groups[*]}" >&2; exit 2; }
  for package in ${groups[$group]}; do
    [ "$(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null)" = installed ] || missing+=("$package")
  done
done
[ ${#missing[@]} -gt 0 ] || exit 0

echo "installing ${missing[*]}" >&2
as_root=()
if [ "$(id -u)" -ne 0 ]; then
  command -v sudo >/dev/null || { echo "$0: neither root nor sudo; install: ${missing[*]}" >&2; exit 1; }
  as_root=(sudo)
fi
export DEBIAN_FRONTEND=noninteractive
apt() { "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o Dpkg::Use-Pty=0 "$@" >&2; }
apt update || true  # a stale list may still do
apt install -y --no-install-recommends "${missing[@]}"
