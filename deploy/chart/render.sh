#!/usr/bin/env bash
# Renew what follows from the chart and the code: its tables, and the plain manifests in deploy/k8s/.
# Uses helm from PATH, else builds it once with go (about 5 minutes of CPU time).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

HELM_VERSION=v3.17.3
KUBERNETES=1.34.0
TOOLS=${XDG_CACHE_HOME:-$HOME/.cache}/kvlane/tools
OUT=deploy/k8s
PYTHON=${PYTHON:-.venv/bin/python}

die() { printf 'chart: %s\n' "$@" >&2; exit 1; }

find_helm() {
  command -v helm && return
  if [ ! -x "$TOOLS/helm" ]; then
    command -v go > /dev/null || die 'neither helm nor go is installed:' \
      'https://helm.sh/docs/intro/install, or go 1.23 or newer'
    GOBIN=$TOOLS go install "helm.sh/helm/v3/cmd/helm@$HELM_VERSION" >&2
  fi
  echo "$TOOLS/helm"
}

helm=$(find_helm)
PYTHONPATH=$PWD "$PYTHON" deploy/chart/generate.py
mkdir -p "$OUT"
rm -f "$OUT"/*.yaml
for values in default deploy/chart/values/*.yaml; do
  name=$(basename "$values" .yaml)
  options=()
  [ "$values" = default ] || options=(--values "$values")
  "$helm" template kvlane deploy/chart --namespace kvlane --kube-version "$KUBERNETES" "${options[@]}" \
    > "$OUT/$name.yaml"
done
PYTHONPATH=$PWD:deploy/chart "$PYTHON" -c "import generate; print(generate.digest())" > "$OUT/chart.sha256"
