#!/usr/bin/env bash
# Runs clang-tidy (.clang-tidy) over our .cc files, two at a time.
# usage: tools/tidy/clang_tidy.sh [--changed [REVISION]] [BUILD_FOLDER]
#   --changed     only .cc files that differ from REVISION (default: origin/main, else main)
#   BUILD_FOLDER  has compile_commands.json (default: build/release)
set -euo pipefail
cd "$(dirname "$0")/../.."
changed=false revision="" build=build/release
while [ $# -gt 0 ]; do
  case "$1" in
    --changed)
      changed=true
      if [ $# -gt 1 ] && git rev-parse --verify --quiet "$2^{commit}" >/dev/null; then revision=$2; shift; fi ;;
    -*) sed -n '2,5s/^# //p' "$0" >&2; exit 2 ;;
    *) build=$1 ;;
  esac
  shift
done
[ -f "$build/compile_commands.json" ] || { echo "$build/compile_commands.json is missing: run cmake --preset release first" >&2; exit 2; }
if $changed; then
  if [ -z "$revision" ]; then revision=$(git rev-parse --verify --quiet origin/main || echo main); fi
  files=$({ git diff --name-only --diff-filter=d "$revision" -- '*.cc'; git ls-files --others --exclude-standard -- '*.cc'; } | sort -u)
else
  files=$(git ls-files --cached --others --exclude-standard -- '*.cc')
fi
# Only what this build compiles: clang-tidy would guess the flags of other files.
known=$(sed -n 's/^ *"file": "\(.*\)",\{0,1\}$/\1/p' "$build/compile_commands.json" | sed "s|^$PWD/||" | sort -u)
files=$(comm -12 <(printf '%s\n' "$files" | sort -u) <(printf '%s\n' "$known"))
[ -n "$files" ] || { echo "clang-tidy: no files to check"; exit 0; }
printf '%s\n' "$files" | xargs -n 1 -P 2 clang-tidy --quiet -p "$build" --extra-arg=-Wno-unknown-warning-option --extra-arg=-Wno-unknown-pragmas 2> >(grep -v 'warnings generated' >&2)
echo "clang-tidy: $(printf '%s\n' "$files" | wc -l) files are clean"
