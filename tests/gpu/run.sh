#!/usr/bin/env bash
# Builds what only a CUDA device can prove and runs it: every kernel, both GEMM paths, the transports, the engine at EP 1
# and logical EP 4 against the CPU device, compute-sanitizer on the small cases, and the bench. Prints one table and
# writes build/gpu/result-check.json and result-bench.json. Exit status 1 on a failure, and when there is no device.
#
# usage: tests/gpu/run.sh [--build-only] [--no-bench]
# Needs CUDA (nvcc, cuBLAS), NCCL, a C++20 compiler, pkg-config, Abseil and zlib; no gRPC, MPI, CMake or test framework.
# CUDA_HOME, CXX, GPU_ARCH (90 for sm_90; default: the device's, else 80, 90 and 100) and JOBS can be set. What was
# built before, here or elsewhere, is used again where sources are older.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

build_only=0 bench=1
for argument in "$@"; do
  case "$argument" in
    --build-only) build_only=1 ;;
    --no-bench) bench=0 ;;
    -h | --help) sed -n '2,10s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "run.sh: unknown argument \"$argument\"; see --help" >&2; exit 2 ;;
  esac
done
refuse() { echo "tests/gpu/run.sh: $*" >&2; exit 1; }

out=build/gpu
program=$out/lrmoe-gpu
export CUDA_HOME=${CUDA_HOME:-/usr/local/cuda}
export CXX=${CXX:-c++}
started=$SECONDS

architectures() {
  local arch found
  found=${GPU_ARCH:-$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | head -1 | tr -d .)}
  for arch in ${found:-80 90 100}; do printf -- ' -gencode arch=compute_%s,code=sm_%s' "$arch" "$arch"; done
}

sources() { # tests/gpu/plain_gemm.cc in the place of kernels/cpu/gemm.cc and packed_gemm.cc, which need oneDNN
  ls kernels/*.cc kernels/cpu/*.cc kernels/cuda/*.cc kernels/cuda/*.cu worker/engine/*.cc controller/planner/*.cc \
    controller/planner/policies/*.cc tests/support/engine/*.cc tests/support/device/*.cc tests/gpu/*.cc | grep -vE '^kernels/cpu/(packed_)?gemm\.cc$'
  ls common/{check,cluster,directory,ids,layer_shape,memory_model,plan_counts,policy,units}.cc worker/transport/{contract,device_link,direct,inproc,nccl}.cc \
    worker/device_choice.cc tests/contract/transport/conformance{,_started}.cc tools/bench/{counting_transport,layer_problem,layer_run,local_plans,slow_transport}.cc
}

# compile SOURCE: one object, when the source or any header is newer.
compile() {
  local source=$1 object flags="-std=c++20 -O2 -I. -Wall -Wextra -Werror -Wno-missing-field-initializers"
  object=$out/${source//\//_}.o
  [ "$object" -nt "$source" ] && [ "$object" -nt "$out/headers" ] && return
  case "$source" in
    *.cu) "$CUDA_HOME/bin/nvcc" -std=c++20 -O3 -I. $ABSL_CFLAGS $GENCODE --Werror=all-warnings \
        -Xcompiler=-Wall,-Wextra,-Werror,-Wno-missing-field-initializers -c "$source" -o "$object" ;;
    kernels/cuda/* | tests/gpu/ipc.cc | worker/transport/nccl.cc) "$CXX" $flags -isystem "$CUDA_HOME/include" $ABSL_CFLAGS -c "$source" -o "$object" ;;
    kernels/*) "$CXX" $flags -O3 -Wno-psabi -fno-math-errno -ffp-contract=off $ABSL_CFLAGS -c "$source" -o "$object" ;;
    *) "$CXX" $flags -Wno-restrict $ABSL_CFLAGS -c "$source" -o "$object" ;;
  esac || { echo "run.sh: cannot compile $source" >&2; exit 255; }
}
export -f compile
export out

build() {
  [ -x "$CUDA_HOME/bin/nvcc" ] || refuse "no nvcc in $CUDA_HOME/bin; set CUDA_HOME"
  [ -e "$CUDA_HOME/include/nccl.h" ] || [ -e /usr/include/nccl.h ] || refuse "no nccl.h in $CUDA_HOME/include"
  pkg-config --exists absl_status absl_statusor absl_strings zlib || refuse "needs Abseil and zlib, found by pkg-config"
  mkdir -p "$out"
  local newest
  # Read to its end: a reader that stops early would kill the writer, and pipefail this script.
  newest=$(find common kernels worker controller tests tools \( -name '*.h' -o -name '*.cuh' \) -printf '%T@ %p\n' | sort -n | tail -1 | cut -d' ' -f2)
  [ -e "$out/headers" ] && [ ! "$newest" -nt "$out/headers" ] || touch -r "$newest" "$out/headers"
  ABSL_CFLAGS=$(pkg-config --cflags absl_status absl_statusor absl_strings)
  GENCODE=$(architectures)
  export ABSL_CFLAGS GENCODE
  sources | xargs -P "${JOBS:-$(nproc)}" -I{} bash -c 'compile "$1"' _ {} || refuse "the build failed"
  local objects=() source libraries=$CUDA_HOME/lib64
  for source in $(sources); do objects+=("$out/${source//\//_}.o"); done
  # Static but for CUDA's own libraries, so that the program can be built on one machine and run on another.
  "$CXX" -o "$program" "${objects[@]}" -L"$libraries" -Wl,-rpath,"$libraries" \
    -Wl,-Bstatic $(pkg-config --libs-only-l --static absl_status absl_statusor absl_strings | tr ' ' '\n' | grep absl | tr '\n' ' ') \
    -lz -Wl,-Bdynamic -lcudart -lcublas -lnccl -lpthread -ldl -lrt
}

if command -v "$CUDA_HOME/bin/nvcc" >/dev/null && pkg-config --exists absl_status 2>/dev/null; then
  build
  echo "built $program in $((SECONDS - started)) s"
elif [ -x "$program" ]; then
  echo "nothing to build with here; using $program as it is"
else
  build # says what is missing
fi
[ "$build_only" -eq 0 ] || exit 0

"$program" facts || exit 1
failed=0
"$program" check "$out/result-check.json" || failed=1
sanitizer=$(command -v compute-sanitizer || echo "$CUDA_HOME/bin/compute-sanitizer")
if [ -x "$sanitizer" ]; then
  for tool in memcheck racecheck; do
    echo "compute-sanitizer $tool"
    "$sanitizer" --tool "$tool" --error-exitcode 1 "$program" check-small >"$out/$tool.log" 2>&1 || { tail -30 "$out/$tool.log"; failed=1; }
  done
else
  echo "compute-sanitizer is not installed: memory and races were NOT checked"
fi
if [ "$bench" -eq 1 ]; then
  "$program" bench "$out/result-bench.json" || failed=1
  if python3 -c 'import torch; torch._grouped_mm' 2>/dev/null; then python3 tests/gpu/grouped_mm.py || failed=1; fi
fi
echo "$((SECONDS - started)) s"
[ "$failed" -eq 0 ] && echo "all passed" || { echo "FAILED"; exit 1; }
