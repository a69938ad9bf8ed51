#!/usr/bin/env bash
# tests/frameworks/install.sh FOLDER: two Python environments with one PyTorch, FOLDER/transformers5 and
# FOLDER/transformers4: the newer and the older form of the same models. About 7 GB; needs a PyPI mirror or the network.
set -euo pipefail
folder=${1:?usage: install.sh FOLDER}
base=${LRMOE_FRAMEWORKS_PYTHON:-/usr/bin/python3}
five="$folder/transformers5" four="$folder/transformers4"

[ -e "$four/complete" ] && exit 0
mkdir -p "$folder"
"$base" -m venv "$five"
"$five/bin/python" -m pip install --quiet "torch>=2.9,<2.10" "transformers>=5.24,<6" "accelerate>=1.15" safetensors \
  "grpcio>=1.51" "protobuf>=4.21" numpy setuptools wheel
"$five/bin/python" -m pip install --quiet --no-deps "megatron-core>=0.16,<0.17"
"$base" -m venv "$four"
packages=$("$five/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
echo "$packages" >"$("$four/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/transformers5.pth"
# Its own packages come first on the path; PyTorch and what they share come from the first environment.
"$four/bin/python" -m pip install --quiet "transformers>=4.57,<4.58"
touch "$four/complete"
