#!/usr/bin/env bash
# Checks that clang-format would change nothing in our C++ files; `format.sh --fix` changes them instead.
set -euo pipefail
cd "$(dirname "$0")/../.."
folders=(common controller kernels proto tests tools worker)
case "${1:-}" in
  "") arguments=(--dry-run -Werror) ;;
  --fix) arguments=(-i) ;;
  *) echo "usage: tools/tidy/format.sh [--fix]" >&2; exit 2 ;;
esac
find "${folders[@]}" -type d -name build -prune -o -type f \( -name '*.h' -o -name '*.cc' -o -name '*.cu' -o -name '*.cuh' \) -print0 |
  xargs -0 -n 20 -P 2 clang-format "${arguments[@]}"
