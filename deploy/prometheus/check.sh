#!/usr/bin/env bash
# Check and test the alert rules with promtool, from PATH, else built once with go (about 3 minutes of CPU time).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

PROMETHEUS_VERSION=v0.316.0  # of the Go module: Prometheus 3.16
TOOLS=${XDG_CACHE_HOME:-$HOME/.cache}/kvlane/tools

find_promtool() {
  command -v promtool && return
  if [ ! -x "$TOOLS/promtool" ]; then
    command -v go > /dev/null || {
      echo 'alerts: neither promtool nor go is installed: https://prometheus.io/download, or go 1.26.7 or newer' >&2
      exit 1
    }
    # Without service discovery, which rules do not need and which is most of the code.
    GOBIN=$TOOLS go install -tags remove_all_sd "github.com/prometheus/prometheus/cmd/promtool@$PROMETHEUS_VERSION" >&2
  fi
  echo "$TOOLS/promtool"
}

promtool=$(find_promtool)
"$promtool" check rules --lint=all --lint-fatal alerts.yaml
"$promtool" test rules alerts_test.yaml
