#!/usr/bin/env bash
# Installs what is missing, builds, and runs every test. Ends with a line "N passed, N failed"; exit status 1 on a failure.
#
# usage: tests/run.sh [--quick] [--preset P] [--no-install]
#   --quick       without the sanitizer builds
#   --preset P    build and test this CMake preset (default release)
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

quick=0 preset=release install=1
while [ $# -gt 0 ]; do
  case "$1" in
    --quick) quick=1; shift ;;
    --preset) preset=${2:?--preset wants a name}; shift 2 ;;
    --no-install) install=0; shift ;;
    -h | --help) sed -n '2,6s/^# \{0,1\}//p' "$0"; exit 0 ;;
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

# count_catch LOG: adds the test cases of every Catch2 program in a ctest log.
count_catch() {
  local ok bad
  read -r ok bad < <(awk '
    /^[0-9]*: ?All tests passed|^All tests passed/ { for (i = 1; i <= NF; i++) if ($i == "test" && $(i+1) ~ /^case/) ok += $(i-1) }
    /test cases:/ {
      for (i = 1; i <= NF; i++) { if ($i == "passed") ok += $(i-1); if ($i == "failed") bad += $(i-1) }
    }
    END { print ok + 0, bad + 0 }' "$1")
  passed=$((passed + ok)) failed=$((failed + bad))
  [ "$bad" -eq 0 ] || failures+=("test cases in $1")
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
  local log="build/ctest-$1.log"
  ctest --preset "$1" --verbose "${@:2}" >"$log" 2>&1
  local status=$?
  local before=$failed
  count_catch "$log"
  # A program that crashed or is no Catch2 program counts as ctest sees it.
  if [ "$status" -ne 0 ] && [ "$failed" -eq "$before" ]; then fail "ctest preset $1"; fi
  if [ "$status" -ne 0 ]; then
    sed -n '/FAILED:$/,/^[0-9]*: *$/p' "$log" | head -80
    sed -n '/The following tests FAILED/,$p' "$log"
  fi
  grep -E 'tests passed|tests failed' "$log"
}

python_summary() {  # python_summary NAME LOG: unittest's own last lines
  local ran bad
  ran=$(sed -n 's/^Ran \([0-9]*\) tests\{0,1\} in.*/\1/p' "$2" | tail -1)
  bad=$(sed -n 's/^FAILED (//p' "$2" | tail -1 | grep -oE '(failures|errors)=[0-9]+' | cut -d= -f2 | paste -sd+ | bc)
  if [ -z "$ran" ]; then tail -30 "$2"; fail "$1"; return; fi
  bad=${bad:-0}
  passed=$((passed + ran - bad))
  if [ "$bad" -gt 0 ]; then grep -A30 '^\(ERROR\|FAIL\):' "$2" | head -120; fail "$1" "$bad"; fi
  echo "$((ran - bad)) of $ran passed"
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
  deploy/install-packages.sh build python text || { fail "packages"; finish; }
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
(cd tests/python && "$python" -m unittest discover) >build/python-unit.log 2>&1
python_summary "Python tests" build/python-unit.log

stage "Python on workers, 2 ranks"
counted "Python on workers" build/python-distributed.log "$python" tests/python/distributed/run.py --bin "$bin"

stage "end to end"
counted "end to end" build/e2e.log "$python" tests/e2e/run.py --build-dir "build/$preset"

if [ "$quick" = 0 ]; then
  for sanitizer in asan tsan; do
    stage "C++ tests, preset $sanitizer"
    build "$sanitizer" lrmoe_tests && unit "$sanitizer" -L unit
  done
fi
finish
