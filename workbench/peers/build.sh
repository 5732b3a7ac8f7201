#!/usr/bin/env bash
# Build what `kvlane bench index --peers` measures kvlane's index against, into build/peers: Dynamo's Rust crate as a
# shared library (needs cargo).
#   workbench/peers/build.sh        JOBS=N: compilers at a time
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
OUT=$(cd ../.. && pwd)/build/peers

command -v cargo >/dev/null || {
  echo "peers: cargo is missing; see https://rustup.rs or: apt-get install cargo" >&2
  exit 1
}
# pins.lock names no registry; a lock that cargo makes itself says what it calls the one it asks.
crate="$OUT/crate"
rm -rf "$crate" && mkdir -p "$crate" && cp -r Cargo.toml src "$crate"
(cd "$crate" && cargo generate-lockfile --quiet)
registry=$(grep -m1 -o 'registry+[^"]*' "$crate/Cargo.lock")
sed "s|\"registry\"|\"$registry\"|" pins.lock > "$crate/Cargo.lock"
(cd "$crate" && cargo build --release --locked --quiet --jobs "${JOBS:-1}" --target-dir "$OUT/cargo")
cp "$OUT/cargo/release/libpeers.so" "$OUT/"
