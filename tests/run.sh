#!/usr/bin/env bash
# Every test that this machine can run: `make test`, after its checks. Argument: the number of processes.
#
# Tests of whole processes wait for brokers, workers and clients, and leave a fifth of two cores unused. So the tests
# in $quick, which need no broker, run at the same time with a low priority, and with longer time limits.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
quick=(tests/unit tests/simulation)
log=build/quick-tests.log

mkdir -p build
nice -n 5 .venv/bin/pytest --timeout 240 "${quick[@]}" >"$log" 2>&1 &
running=$!
trap 'kill "$running" 2>/dev/null' EXIT
# Each process has a broker of its own. Files stay whole and in their order: tests that wait come first.
.venv/bin/pytest -n "$1" --dist loadfile --no-loadscope-reorder "${quick[@]/#/--ignore=}"
whole=$?
((whole == 2)) && exit 2  # interrupted

echo "waiting for the rest of ${quick[*]} ..."
wait "$running"
rest=$?
trap - EXIT
if ((rest)); then cat "$log"; else tail -n 1 "$log"; fi
exit $((whole ? whole : rest))
