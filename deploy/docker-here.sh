#!/usr/bin/env bash
# A Docker daemon on a bare Debian or Ubuntu machine, for the images and the tests in containers:
#   docker-here.sh         install Docker, start its daemon
#   docker-here.sh stop    end the daemon that this script started, and delete its data
# Every step is skipped if it is done already, so it is safe to run again. Needs root or sudo. Other
# scripts of deploy/ source it for its functions.
#
# Settings, from the environment:
#   DOCKER_HOST      socket to use, default unix:///var/run/docker.sock
#   DOCKER_STATE     directory for the data of the daemon, default /var/lib/kvlane-docker
set -euo pipefail

STATE=${DOCKER_STATE:-/var/lib/kvlane-docker}
export DOCKER_HOST=${DOCKER_HOST:-unix:///var/run/docker.sock}
DAEMON_DEADLINE_S=30
WORK=$(mktemp -d)
trap '$SUDO rm -rf --one-file-system "$WORK"' EXIT

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
  # setsid: Ctrl-C in this script does not reach the daemon. Without inherited descriptors: a lock of
  # the caller's would last as long as the daemon.
  $SUDO setsid bash -c 'log=$1; shift
    for fd in /proc/self/fd/*; do fd=${fd##*/}; ((fd < 3)) || eval "exec $fd>&-"; done
    exec "$@" > "$log" 2>&1 < /dev/null' - "$STATE/dockerd.log" \
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

# build_base IMAGE RELEASE PACKAGE...: an image of this machine's distribution, without a registry
build_base() {
  local base=$1 release=$2 rootfs=$WORK/rootfs packages
  shift 2
  packages=$(IFS=,; echo "$*")
  command -v debootstrap > /dev/null || install_packages debootstrap
  say "making $base: $packages, about 2 minutes"
  quietly "$WORK/debootstrap.log" $SUDO debootstrap --variant=minbase \
    --include="$packages" "$release" "$rootfs" "$(package_mirror "$release")"
  $SUDO rm -rf "$rootfs"/var/cache/apt/archives/*.deb "$rootfs"/var/lib/apt/lists/* \
    "$rootfs"/usr/share/{doc,man,locale}/*
  $SUDO tar -C "$rootfs" -c . \
    | docker import --change 'ENV LANG=C.UTF-8' - "$base" > /dev/null
  say "made $base, $(image_size "$base")"
}

if [ "${BASH_SOURCE[0]}" = "$0" ]; then
  case ${1-start} in
    start) start_daemon ;;
    stop) stop_daemon ;;
    *) fail 'usage: docker-here.sh [stop]' ;;
  esac
fi
