#!/usr/bin/env bash
# From a bare Debian or Ubuntu machine to a Kafka image that the tests can run in Docker:
#   build-image.sh         install Docker, start its daemon, pull or build the image
#   build-image.sh stop    end the daemon that this script started, and delete its data
# Every step is skipped if it is done already, so it is safe to run again. Needs root or sudo.
#
# The official image is pulled where a registry is reachable. Elsewhere kvlane/kafka:<version> is built
# from the machine's own package mirror (Debian, Java) and from Maven (Kafka): about 4 minutes.
#
# Settings, from the environment:
#   DOCKER_HOST, DOCKER_STATE     as in deploy/docker-here.sh
#   BUILD=always                  build, even where the official image could be pulled
#   PYTHON                        Python 3.11 or newer, default .venv/bin/python or python3
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
PULL_DEADLINE_S=180
# shellcheck source=deploy/docker-here.sh
source "$HERE/../docker-here.sh"

find_python() {
  local candidate
  for candidate in "${PYTHON-}" "$ROOT/.venv/bin/python" python3; do
    if [ -n "$candidate" ] && "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
      2> /dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail 'no Python 3.11 or newer: set PYTHON, or apt-get install python3'
}

# kafka EXPRESSION: evaluates it over the module with version and jars
kafka() {
  PYTHONPATH=$ROOT "$(find_python)" -c "from kvlane.streams.brokers import jvm_artifacts; print($1)"
}

build_image() {
  local image=$1 release base
  release=$(. /etc/os-release && echo "$VERSION_CODENAME")
  base=kvlane/debian-jre:$release
  have_image "$base" || build_base "$base" "$release" openjdk-17-jre-headless
  command -v mvn > /dev/null || install_packages maven
  cp -r "$HERE/image" "$WORK/context"
  cp -r "$(kafka 'jvm_artifacts.jars()')" "$WORK/context/jars"
  say "building $image"
  DOCKER_BUILDKIT=0 quietly "$WORK/build.log" \
    docker build --build-arg BASE="$base" --tag "$image" "$WORK/context"
}

provide_image() {
  local version official own
  version=$(kafka jvm_artifacts.KAFKA_VERSION)
  official=apache/kafka:$version
  own=kvlane/kafka:$version
  if have_image "$own" || { have_image "$official" && [ "${BUILD-}" != always ]; }; then
    say 'the image is here already'
  elif [ "${BUILD-}" != always ] \
    && timeout "$PULL_DEADLINE_S" docker pull --quiet "$official" > "$WORK/pull.log" 2>&1; then
    say "pulled $official"
  else
    [ "${BUILD-}" = always ] || say "cannot pull $official: $(tail -n 1 "$WORK/pull.log")"
    build_image "$own"
    say "built $own, $(image_size "$own")"
  fi
}

case ${1-start} in
  start)
    start_daemon
    provide_image
    ;;
  stop) stop_daemon ;;
  *) fail 'usage: build-image.sh [stop]' ;;
esac
