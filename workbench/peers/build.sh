#!/usr/bin/env bash
# Build what benchmarks measure kvlane against, into build/peers. For `kvlane bench index --peers`: Dynamo's
# Rust crate as a shared library (needs cargo). For `kvlane bench peer-router`: SGLang's router, a wheel in an
# environment of its own.
#   workbench/peers/build.sh [library|router]...    default: all        JOBS=N: compilers at a time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
OUT=$(cd ../.. && pwd)/build/peers

library() {
  command -v cargo >/dev/null || {
    echo "peers: cargo is missing; see https://rustup.rs or: apt-get install cargo" >&2
    return 1
  }
  # pins.lock names no registry; a lock that cargo makes itself says what it calls the one it asks.
  local crate="$OUT/crate" registry
  rm -rf "$crate" && mkdir -p "$crate" && cp -r Cargo.toml src "$crate"
  (cd "$crate" && cargo generate-lockfile --quiet)
  registry=$(grep -m1 -o 'registry+[^"]*' "$crate/Cargo.lock")
  sed "s|\"registry\"|\"$registry\"|" pins.lock > "$crate/Cargo.lock"
  (cd "$crate" && cargo build --release --locked --quiet --jobs "${JOBS:-1}" --target-dir "$OUT/cargo")
  cp "$OUT/cargo/release/libpeers.so" "$OUT/"
}

router() {
  "${PYTHON:-python3}" -m venv --clear "$OUT/router"
  "$OUT/router/bin/python" -m pip install --quiet --disable-pip-version-check sglang-router==0.3.2
}

mkdir -p "$OUT"
for part in "${@:-library router}"; do
  for name in $part; do "$name"; done
done
