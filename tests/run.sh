#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test. Ends with a line "N passed, N failed"; exit status 1 on a failure.
#
# usage: tests/run.sh [--frameworks] [--sanitizers] [--preset P] [--no-install]
#   --frameworks  install both transformers environments in build/frameworks and test with them; without it they are tested
#                 where already installed
#   --sanitizers  build and run the C++ tests twice more: address and undefined-behaviour, then thread sanitizer
#   --preset P    build and test this CMake preset (default release)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

frameworks=0 sanitizers=0 preset=release install=1
while [ $# -gt 0 ]; do
  case "$1" in
    --frameworks) frameworks=1; shift ;;
    --sanitizers) sanitizers=1; shift ;;
    --preset) preset=${2:?--preset wants a name}; shift 2 ;;
    --no-install) install=0; shift ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "run.sh: unknown argument \"$1\"; see --help" >&2; exit 2 ;;
  esac
done

passed=0 failed=0
failures=()
started=$SECONDS

stage() { printf '\n=== %s  (%ds)\n' "$*" $((SECONDS - started)); }
fail() { failed=$((failed + ${2:-1})); failures+=("$1"); echo "FAILED: $1"; }
finish() {
  for name in "${failures[@]}"; do echo "failed: $name"; done
  printf '\n%d s\n%d passed, %d failed\n' $((SECONDS - started)) "$passed" "$failed"
  [ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
  exit
}

# count KIND LOG NAME: adds the tests of a log, see count.py. Sets `bad`.
count() {
  local ok
  read -r ok bad < <(python3 tests/count.py "$1" "$2")
  passed=$((passed + ok))
  [ "$bad" -eq 0 ] || fail "$3" "$bad"
  echo "$ok passed, $bad failed"
}

build() {  # build PRESET [TARGET...]
  local log="build/test-build-$1.log" target
  mkdir -p build
  local targets=()
  for target in "${@:2}"; do targets+=(--target "$target"); done
  cmake --preset "$1" >"$log" 2>&1 && cmake --build --preset "$1" "${targets[@]}" >>"$log" 2>&1 || {
    tail -60 "$log"
    fail "build of preset $1"
    return 1
  }
}

unit() {  # unit PRESET [CTEST ARGUMENT...]
  local log="build/ctest-$1.log" bad status
  ctest --preset "$1" --verbose "${@:2}" >"$log" 2>&1
  status=$?
  count ctest "$log" "C++ tests, preset $1"
  if [ "$status" -ne 0 ]; then
    [ "$bad" -gt 0 ] || fail "ctest preset $1"
    grep -B2 -A12 'FAILED:$' "$log" | head -100
    sed -n '/The following tests FAILED/,$p' "$log"
  fi
}

python_tests() {  # python_tests NAME LOG COMMAND...
  local bad
  "${@:3}" >"$2" 2>&1
  count unittest "$2" "$1"
  [ "$bad" -eq 0 ] || grep -A30 '^\(ERROR\|FAIL\):' "$2" | head -120
}

counted() {  # counted NAME LOG COMMAND...: a program that ends with "N passed, N failed"
  local name=$1 log=$2 line
  shift 2
  "$@" >"$log" 2>&1
  local status=$?
  line=$(grep -E '^[0-9]+ passed, [0-9]+ failed$' "$log" | tail -1)
  if [ -z "$line" ]; then tail -40 "$log"; fail "$name"; return; fi
  passed=$((passed + $(echo "$line" | cut -d' ' -f1)))
  local bad
  bad=$(echo "$line" | cut -d' ' -f3)
  if [ "$bad" -gt 0 ]; then tail -80 "$log"; fail "$name" "$bad"; elif [ "$status" -ne 0 ]; then fail "$name"; fi
  grep -E '^(worst|AdamW)' "$log"
  echo "$line"
}

if [ "$install" = 1 ]; then
  stage "packages"
  deploy/install-packages.sh build python tests text || { fail "packages"; finish; }
fi
python=${LRMOE_PYTHON:-/usr/bin/python3}
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 OMPI_MCA_mpi_yield_when_idle=1 \
  OMPI_MCA_rmaps_base_oversubscribe=1

stage "build, preset $preset"
build "$preset" || finish
bin="$PWD/build/$preset/bin"
export PYTHONPATH="$PWD/build/$preset/python"

stage "C++ tests, preset $preset"
unit "$preset"

stage "Python tests"
python_tests "Python tests" build/python-unit.log "$python" -m unittest discover -s tests/python

stage "Python tests, every call on gRPC"
python_tests "Python tests on gRPC" build/python-grpc.log env LRMOE_LANE=0 "$python" -m unittest discover -s tests/python

stage "Python on workers, 2 ranks"
counted "Python on workers" build/python-distributed.log "$python" tests/python/distributed/run.py --bin "$bin"

stage "end to end"
counted "end to end" build/e2e.log "$python" tests/e2e/run.py --build-dir "build/$preset"

if [ -x "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc" ]; then
  stage "the proof for a device builds without CMake, gRPC and MPI"
  if GPU_ARCH=90 tests/gpu/run.sh --build-only >build/gpu-build.log 2>&1; then passed=$((passed + 1)); tail -1 build/gpu-build.log; else
    tail -20 build/gpu-build.log
    fail "tests/gpu/run.sh --build-only"
  fi
fi

if [ "$frameworks" = 1 ]; then
  stage "transformers environments"
  deploy/install-packages.sh frameworks || fail "packages of the frameworks"
  tests/frameworks/install.sh build/frameworks >build/frameworks-install.log 2>&1 ||
    { tail -20 build/frameworks-install.log; fail "transformers environments"; }
fi
for environment in build/frameworks/transformers*; do
  [ -x "$environment/bin/python" ] || continue
  name=$(basename "$environment")
  stage "frameworks, $name"
  python_tests "refusals, $name" "build/refusals-$name.log" "$environment/bin/python" -m unittest discover -s tests/frameworks
  counted "frameworks, $name" "build/$name.log" "$environment/bin/python" tests/frameworks/run.py --bin "$bin"
done

if [ "$sanitizers" = 1 ]; then
  for sanitizer in asan tsan; do
    stage "C++ tests, preset $sanitizer"
    build "$sanitizer" lrmoe_tests && unit "$sanitizer" -L unit
  done
fi
finish
