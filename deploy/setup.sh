#!/usr/bin/env bash
# Build .venv: the pinned packages of deploy/requirements/dev.txt and this project, editable.
# Then compile the kernels of the index, so that no process has to when it starts.
# Called by `make setup`. Does nothing when nothing changed. PYTHON=/path/to/python picks another interpreter.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

UV_VERSION=0.13.8
LOCK=deploy/requirements/dev.txt
STAMP=.venv/.kvlane-stamp
COMPILED=.venv/.kvlane-compiled

say() { printf 'setup: %s\n' "$*"; }
die() { printf 'setup: %s\n' "$@" >&2; exit 1; }

is_usable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

find_python() {
  local candidate
  for candidate in ${PYTHON:-python3.11 python3.12 python3.13 python3}; do
    if is_usable "$candidate"; then echo "$candidate"; return; fi
  done
  die "${PYTHON:+PYTHON=$PYTHON is not usable: }Python 3.11 or newer is needed." \
    "Debian, Ubuntu: sudo apt-get install python3.11 python3.11-venv" \
    "or name an interpreter: make setup PYTHON=/path/to/python3.11"
}

# Inputs of the environment. The path is one, because an editable install contains it.
fingerprint() {
  { cat pyproject.toml "$LOCK" deploy/setup.sh
    pwd
    .venv/bin/python -c 'import sys; print(sys.version)'
  } 2>/dev/null | sha256sum
}

is_current() { [[ -x .venv/bin/python && -f $STAMP && $(<"$STAMP") == "$(fingerprint)" ]]; }

# A kernel that cannot be compiled fails the tests, not the set-up.
compile_kernels() {
  local sources
  sources=$(find indexer -name '*.py' -exec sha256sum {} + | sort | sha256sum)
  if [[ -f $COMPILED && $(<"$COMPILED") == "$sources" ]]; then return; fi
  if .venv/bin/python -m kvlane.indexer.precompile; then
    echo "$sources" >"$COMPILED"
  else
    say "the kernels of the index could not be compiled, for the reason above"
  fi
}

if is_current; then compile_kernels; exit 0; fi

# One set-up at a time in this tree; one that waited finds the environment current.
if command -v flock >/dev/null; then
  exec 9<.
  flock 9
  if is_current; then compile_kernels; exit 0; fi
fi

if ! is_usable .venv/bin/python || ! .venv/bin/python -m pip --version >/dev/null 2>&1; then
  python=$(find_python)
  say "making .venv with $("$python" --version)"
  if ! output=$("$python" -m venv --clear .venv 2>&1); then
    rm -rf .venv
    minor=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    die "$output" "The venv module does not work with $python." \
      "Debian, Ubuntu: sudo apt-get install python$minor-venv"
  fi
fi

say "installing $(grep -c '==' "$LOCK") pinned packages"
rm -f "$STAMP"
.venv/bin/python -m pip install --quiet --disable-pip-version-check "uv==$UV_VERSION" \
  || die "pip could not install uv: is a package index reachable? (see 'pip config list')"
# pip is slower, but honours every mirror and certificate that is configured for it.
.venv/bin/uv pip install --quiet --python .venv/bin/python -r "$LOCK" \
  || { say "uv failed, trying pip"; .venv/bin/python -m pip install --quiet -r "$LOCK"; } \
  || die "the packages of $LOCK could not be installed, for the reason above"
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable . \
  || die "the project itself could not be installed: check pyproject.toml"

# uv leaves this to the first import, and that cannot do it where PYTHONDONTWRITEBYTECODE is set or the
# environment is read-only: numba would take 0.8 instead of 0.25 s to import, in every process.
.venv/bin/python -m compileall -q -j 0 .venv/lib/python3*/site-packages \
  || say "some packages have sources that Python cannot compile; they may not need to"
say "compiling the kernels of the index"
rm -f "$COMPILED"
compile_kernels
fingerprint >"$STAMP"
say "done: .venv is ready"
