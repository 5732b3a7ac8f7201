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
#   DOCKER_HOST      socket to use, default unix:///var/run/docker.sock
#   DOCKER_STATE     directory for the data of the daemon, default /var/lib/kvlane-docker
#   BUILD=always     build, even where the official image could be pulled
#   PYTHON           Python 3.11 or newer, default .venv/bin/python or python3
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
STATE=${DOCKER_STATE:-/var/lib/kvlane-docker}
export DOCKER_HOST=${DOCKER_HOST:-unix:///var/run/docker.sock}
DAEMON_DEADLINE_S=30
PULL_DEADLINE_S=180

SUDO=
[ "$(id -u)" = 0 ] || SUDO=sudo

say() { printf '[%4d s] %s\n' "$SECONDS" "$*"; }
fail() { say "$*" >&2; exit 1; }

# quietly LOG COMMAND...: shows the end of the output only when the command fails
quietly() {
  local log=$1
  shift
  "$@" > "$log" 2>&1 || { tail -n 30 "$log" >&2; fail "failed: $*"; }
}

install_packages() {
  say "installing $*"
  quietly "$WORK/apt.log" $SUDO apt-get update
  quietly "$WORK/apt.log" $SUDO env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y --no-install-recommends "$@"
}

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

# kafka EXPRESSION: evaluates it over the module that knows version and jars
kafka() {
  PYTHONPATH=$ROOT "$(find_python)" -c "from streams import javaruntime; print($1)"
}

daemon_answers() { timeout 5 docker info > /dev/null 2>&1; }

start_daemon() {
  daemon_answers && return
  local packages=()
  command -v dockerd > /dev/null || packages+=(docker.io)
  command -v iptables > /dev/null || packages+=(iptables)
  [ ${#packages[@]} = 0 ] || install_packages "${packages[@]}"
  command -v docker > /dev/null || install_packages docker-cli  # its own package after Debian 12
  daemon_answers && return  # the package has started it

  $SUDO mkdir -p "$STATE"
  # Without rules of its own in the firewall, which would outlive it: published ports go through
  # its proxy, and containers reach nothing outside, which brokers need not.
  # setsid: Ctrl-C in this script does not reach the daemon.
  $SUDO setsid sh -c 'log=$1; shift; exec "$@" > "$log" 2>&1 < /dev/null' - "$STATE/dockerd.log" \
    dockerd --host "$DOCKER_HOST" --data-root "$STATE/data" --exec-root "$STATE/exec" \
    --pidfile "$STATE/dockerd.pid" --iptables=false --ip6tables=false --ip-forward=false &
  local deadline=$((SECONDS + DAEMON_DEADLINE_S))
  until daemon_answers; do
    if ((SECONDS > deadline)); then
      tail -n 20 "$STATE/dockerd.log" >&2
      fail "dockerd does not answer after $DAEMON_DEADLINE_S s"
    fi
    sleep 0.2
  done
  say "started dockerd $(docker version --format '{{.Server.Version}}')"
}

stop_daemon() {
  local pid deadline=$((SECONDS + DAEMON_DEADLINE_S))
  if [ -f "$STATE/dockerd.pid" ]; then
    pid=$(cat "$STATE/dockerd.pid")
    $SUDO kill "$pid"
    while $SUDO kill -0 "$pid" 2> /dev/null; do
      ((SECONDS <= deadline)) || fail "dockerd ($pid) does not end"
      sleep 0.1
    done
    $SUDO ip link delete docker0 2> /dev/null || true  # its bridge stays otherwise
    say 'stopped dockerd'
  else
    say 'no daemon of this script is running'
  fi
  [ ! -d "$STATE" ] || $SUDO rm -rf "$STATE"
}

have_image() { docker image inspect "$1" > /dev/null 2>&1; }

image_size() { docker image inspect --format '{{.Size}}' "$1" | awk '{printf "%d MB", $1 / 1e6}'; }

# The mirror that apt uses, so that a proxy or a mirror of one's own is used here too.
package_mirror() {
  apt-get indextargets --format '$(REPO_URI) $(RELEASE)' 'Created-By: Packages' \
    | awk -v release="$1" '$2 == release { print $1; exit }'
}

build_base() {
  local base=$1 release=$2 rootfs=$WORK/rootfs
  command -v debootstrap > /dev/null || install_packages debootstrap
  say "making $base: Debian packages and Java, about 2 minutes"
  quietly "$WORK/debootstrap.log" $SUDO debootstrap --variant=minbase \
    --include=openjdk-17-jre-headless "$release" "$rootfs" "$(package_mirror "$release")"
  $SUDO rm -rf "$rootfs"/var/cache/apt/archives/*.deb "$rootfs"/var/lib/apt/lists/* \
    "$rootfs"/usr/share/{doc,man,locale}/*
  $SUDO tar -C "$rootfs" -c . \
    | docker import --change 'ENV LANG=C.UTF-8' - "$base" > /dev/null
  say "made $base, $(image_size "$base")"
}

build_image() {
  local image=$1 release base
  release=$(. /etc/os-release && echo "$VERSION_CODENAME")
  base=kvlane/debian-jre:$release
  have_image "$base" || build_base "$base" "$release"
  command -v mvn > /dev/null || install_packages maven
  cp -r "$HERE/image" "$WORK/context"
  cp -r "$(kafka 'javaruntime.jars()')" "$WORK/context/jars"
  say "building $image"
  DOCKER_BUILDKIT=0 quietly "$WORK/build.log" \
    docker build --build-arg BASE="$base" --tag "$image" "$WORK/context"
}

provide_image() {
  local version official own
  version=$(kafka javaruntime.KAFKA_VERSION)
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
    WORK=$(mktemp -d)
    trap '$SUDO rm -rf --one-file-system "$WORK"' EXIT
    start_daemon
    provide_image
    ;;
  stop) stop_daemon ;;
  *) fail 'usage: build-image.sh [stop]' ;;
esac
