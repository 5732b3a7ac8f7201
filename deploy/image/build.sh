#!/usr/bin/env bash
# The image of kvlane, kvlane:<version>. Installs Docker and starts its daemon where none answers.
#   build.sh            without vLLM
#   build.sh vllm       with vLLM for CUDA: kvlane:<version>-vllm
#
# Where no image registry answers, a base of this machine's distribution is made with debootstrap, and
# the packages are fetched here, outside of the builder.
#
# Settings, from the environment:
#   BASE             base image, default python:3.11-slim, or kvlane/python:<release> made here
#   KERNEL_CPU       as in the Dockerfile, default x86-64-v3, on ARM neoverse-n1
#   DOCKER_HOST, DOCKER_STATE     as in deploy/docker-here.sh
#   PYTHON           Python 3.11 or newer with pip, default .venv/bin/python
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
PULL_DEADLINE_S=180
# shellcheck source=deploy/docker-here.sh
source "$HERE/../docker-here.sh"
VARIANT=${1-}
KERNEL_CPU=${KERNEL_CPU:-$(case $(uname -m) in aarch64) echo neoverse-n1 ;; *) echo x86-64-v3 ;; esac)}
PYTHON=${PYTHON:-$ROOT/.venv/bin/python}
OFFICIAL_BASE=python:3.11-slim

local_base() {
  local release base
  release=$(. /etc/os-release && echo "$VERSION_CODENAME")
  base=kvlane/python:$release
  have_image "$base" || build_base "$base" "$release" python3 python3-venv ca-certificates >&2
  echo "$base"
}

fetch_wheels() {
  say 'fetching the packages'
  rm -rf "$ROOT/build/wheels"
  quietly "$WORK/wheels.log" "$PYTHON" -m pip download --quiet --require-hashes --only-binary :all: \
    --dest "$ROOT/build/wheels" -r "$ROOT/deploy/requirements/image${VARIANT:+-$VARIANT}.txt"
  quietly "$WORK/tools.log" "$PYTHON" -m pip download --quiet --require-hashes --only-binary :all: \
    --dest "$ROOT/build/wheels" -r "$ROOT/deploy/requirements/image-tools.txt"
}

[ -z "$VARIANT" ] || [ "$VARIANT" = vllm ] || fail 'usage: build.sh [vllm]'
start_daemon
options=()
rm -rf "$ROOT/build/wheels"
if [ -z "${BASE-}" ]; then
  if have_image "$OFFICIAL_BASE" \
    || timeout "$PULL_DEADLINE_S" docker pull --quiet "$OFFICIAL_BASE" > "$WORK/pull.log" 2>&1; then
    BASE=$OFFICIAL_BASE
  else
    say "cannot pull $OFFICIAL_BASE: $(tail -n 1 "$WORK/pull.log")"
    BASE=$(local_base)
    fetch_wheels
    options+=(--build-arg PIP_NO_INDEX=1)
  fi
fi
version=$(sed -n 's/^version = "\(.*\)"/\1/p' "$ROOT/pyproject.toml")
image=kvlane:$version${VARIANT:+-$VARIANT}
say "building $image on $BASE"
DOCKER_BUILDKIT=${DOCKER_BUILDKIT-0} quietly "$WORK/build.log" docker build "${options[@]}" \
  --build-arg BASE="$BASE" --build-arg VARIANT="$VARIANT" --build-arg KERNEL_CPU="$KERNEL_CPU" \
  --label org.opencontainers.image.title=kvlane --label org.opencontainers.image.version="$version" \
  --label org.opencontainers.image.licenses=Apache-2.0 --label org.opencontainers.image.base.name="$BASE" \
  --label org.opencontainers.image.revision="$(git -C "$ROOT" rev-parse HEAD 2> /dev/null || echo unknown)" \
  --file "$HERE/Dockerfile" --tag "$image" "$ROOT"
rm -rf "$ROOT/build/wheels"
mkdir -p "$ROOT/build"
bill=build/sbom${VARIANT:+-$VARIANT}.cdx.json
docker run --rm "$image" cat /opt/kvlane/sbom.cdx.json > "$ROOT/$bill"
docker run --rm "$image" dpkg-query -W -f '${Package} ${Version} ${Architecture}\n' \
  | "$PYTHON" "$HERE/add_os_packages.py" "$ROOT/$bill"
say "built $image, $(image_size "$image"); its packages: $bill"
