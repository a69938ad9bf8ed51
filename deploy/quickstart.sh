#!/usr/bin/env bash
# Installs, builds and runs lrmoe's main job on this machine: a controller, one worker and one PyTorch training process
# per rank, a small Mixture-of-Experts language model learning real text. First with every row kept, then with the
# planned, compact backward under a memory budget; same seed and data.
set -euo pipefail

usage() {
  cat <<USAGE
usage: deploy/quickstart.sh [--ranks N] [--steps N] [--min-retention R] [--text PATH] [--out DIR] ...

  --ranks N          workers and training processes, 2..16 (default 2)
  --steps N          training steps of each arm, 10..100000 (default 200)
  --min-retention R  lowest candidate retention rate of the second arm, 0.1..0.95 (default 0.7)
  --text PATH        text to learn, at least 100 kB (default: prose of Debian's perl-doc)
  --out DIR          where summary.json, plots and logs go (default out/quickstart)
  --dtype TYPE       compute type of the experts: fp32 (default) or bf16
  --seed N           of weights and data (default 1)
  --no-install       do not install Debian packages
  --build-dir DIR    use the programs of this build instead of building (default: build/release, built)
  --python PROGRAM   Python to train with (default: the first of python3 and /usr/bin/python3 that has PyTorch)
USAGE
}

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
install=1 build_dir="" python="" forwarded=() text=""
need() { [ $# -ge 2 ] || { echo "quickstart.sh: $1 wants a value" >&2; exit 2; }; }
while [ $# -gt 0 ]; do
  case "$1" in
    --ranks | --steps | --min-retention | --out | --dtype | --seed) need "$@"; forwarded+=("$1" "$2"); shift 2 ;;
    --text) need "$@"; text=$2; forwarded+=("$1" "$2"); shift 2 ;;
    --no-install) install=0; shift ;;
    --build-dir) need "$@"; build_dir=$2; shift 2 ;;
    --python) need "$@"; python=$2; shift 2 ;;
    -h | --help) usage; exit 0 ;;
    --version) sed -n 's/^project(lrmoe VERSION \([0-9.]*\).*/quickstart.sh \1/p' "$root/CMakeLists.txt"; exit 0 ;;
    *) echo "quickstart.sh: unknown argument \"$1\"" >&2; usage >&2; exit 2 ;;
  esac
done

has() {  # has PYTHON CODE: does it run?
  "$1" -c "$2" >/dev/null 2>&1
}
has_torch='
import torch, torch.distributed as d
version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
assert version >= (1, 13) and d.is_available() and d.is_gloo_available()'
has_torch_1_13='
import torch, torch.distributed as d
assert torch.__version__.startswith("1.13") and d.is_available()'
has_rest='import google.protobuf, grpc, matplotlib, numpy'

find_torch() {
  local candidate
  for candidate in python3 /usr/bin/python3; do
    # PyTorch 1.13 cannot say whether it has gloo; Debian's has.
    if has "$candidate" "$has_torch" || has "$candidate" "$has_torch_1_13"; then echo "$candidate"; return; fi
  done
}

[ "$install" = 0 ] || [ -n "$build_dir" ] || "$root/deploy/install-packages.sh" build
[ "$install" = 0 ] || [ -n "$text" ] || "$root/deploy/install-packages.sh" text
if [ -z "$python" ]; then
  python=$(find_torch)
  if [ "$install" = 1 ] && { [ -z "$python" ] || [ "$(command -v "$python")" = /usr/bin/python3 ]; }; then
    "$root/deploy/install-packages.sh" python
    python=/usr/bin/python3
  fi
  [ -n "$python" ] || { echo "quickstart.sh: no python3 with PyTorch >= 1.13, and --no-install" >&2; exit 1; }
fi
if ! has "$python" "$has_rest"; then
  [ "$install" = 1 ] || { echo "quickstart.sh: $python lacks one of grpc, protobuf, numpy, matplotlib" >&2; exit 1; }
  "$python" -m venv --system-site-packages "$root/build/quickstart-venv"
  python="$root/build/quickstart-venv/bin/python"
  "$python" -m pip install --quiet grpcio protobuf numpy matplotlib
fi

if [ -z "$build_dir" ]; then
  build_dir="$root/build/release"
  echo "building $build_dir (the first time takes some minutes)"
  mkdir -p "$root/build"
  log="$root/build/quickstart-build.log"
  programs="lrmoe-controller lrmoe-worker lrmoectl lrmoe-sim lrmoe_python"
  (cd "$root" && cmake --preset release >"$log" 2>&1 &&
    cmake --build --preset release --target $programs >>"$log" 2>&1) || { tail -40 "$log" >&2; exit 1; }
fi

exec "$python" "$root/deploy/quickstart/run.py" --build-dir "$build_dir" "${forwarded[@]}"
