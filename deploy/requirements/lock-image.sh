#!/usr/bin/env bash
# Pins the packages of the image, with their hashes: the versions of dev.txt. Called by `make lock`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

compile() {
  .venv/bin/uv pip compile --constraint deploy/requirements/dev.txt --python-version 3.11 --no-header --no-annotate \
    --no-emit-index-url --generate-hashes --quiet "$@"
}

compile pyproject.toml --extra traces --universal --output-file deploy/requirements/image.txt
compile pyproject.toml --extra traces --extra vllm --python-platform x86_64-manylinux_2_28 \
  --output-file deploy/requirements/image-vllm.txt
compile deploy/requirements/image-tools.in --allow-unsafe --universal --output-file deploy/requirements/image-tools.txt
