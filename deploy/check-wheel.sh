#!/usr/bin/env bash
# Build the wheel, install it without the checkout, and run the demo from it: `make wheel`, and CI.
# The packages are those of deploy/requirements/dev.txt, but only the ones which the wheel asks for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
folder=$root/build/wheel

rm -rf "$folder" build/lib build/bdist.*
mkdir -p "$folder/elsewhere"
.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --wheel-dir "$folder" .
wheel=$(echo "$folder"/kvlane-*.whl)
.venv/bin/uv venv --quiet --python .venv/bin/python "$folder/env"
.venv/bin/uv pip install --quiet --python "$folder/env/bin/python" \
  --constraint deploy/requirements/dev.txt "kvlane[demo] @ file://$wheel"

cd "$folder/elsewhere"  # no module of the checkout is on the path here
"$folder/env/bin/kvlane" --version
"$folder/env/bin/kvlane" demo --broker memory "Hello from the wheel" </dev/null
echo "the demo ran from $(basename "$wheel")"
