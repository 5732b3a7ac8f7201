#!/usr/bin/env bash
# The files of a release in build/release/: wheel, sdist, chart, bills of materials, checksums: `make release`.
# All of them follow from the commit alone: a second run gives the same bytes. With a Docker daemon, the image as well.
#   release.sh             a commit with the tag v<version>, without changes
#   release.sh --no-image  without the image and its bill of materials
#   release.sh --try       any commit, and no image
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
umask 022  # the modes of files are part of an archive
out=$PWD/build/release
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

die() { printf 'release: %s\n' "$@" >&2; exit 1; }
say() { printf 'release: %s\n' "$*"; }
mode=${1-}
case $mode in '' | --no-image | --try) ;; *) die 'usage: release.sh [--no-image | --try]' ;; esac

version=$(sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
commit=$(git rev-parse HEAD)
if [ "$mode" != --try ]; then
  [ -z "$(git status --porcelain)" ] || die 'the checkout has changes: commit or remove them'
  grep -q "^## \[$version\] - " CHANGELOG.md || die "CHANGELOG.md has no heading of $version: name the release there"
  [ "$(git describe --exact-match --tags HEAD 2>/dev/null)" = "v$version" ] \
    || die "the commit has no tag v$version: git tag -a v$version -m 'kvlane $version'"
fi
SOURCE_DATE_EPOCH=$(git log -1 --format=%ct)
export SOURCE_DATE_EPOCH TZ=UTC

# An archive of the same files has the same bytes: sorted, with the time of the commit, of nobody.
packed() {
  tar --create --sort=name --owner=0 --group=0 --numeric-owner --mode=u+rw,go=rX --mtime="@$SOURCE_DATE_EPOCH" \
    --directory="$1" "$2" | gzip --no-name --best
}

rm -rf "$out"
mkdir -p "$out" "$work/source" "$work/raw"
git -c tar.umask=0022 archive HEAD | tar --extract --directory="$work/source"
say "building kvlane $version of ${commit:0:12}"
python=$PWD/.venv/bin/python
for kind in sdist wheel; do
  (cd "$work/source" && "$python" -c "from setuptools import build_meta; build_meta.build_$kind('$work/raw')") \
    > "$work/build.log" 2>&1 || { tail -n 20 "$work/build.log" >&2; die "the $kind cannot be built"; }
done
cp "$work"/raw/*.whl "$out"
mkdir "$work/sdist"
tar --extract --file="$work/raw/kvlane-$version.tar.gz" --directory="$work/sdist"
packed "$work/sdist" "kvlane-$version" > "$out/kvlane-$version.tar.gz"

# As `helm package` does, but with the time of the commit.
mkdir "$work/chart"
cp -r "$work/source/deploy/chart" "$work/chart/kvlane"
rm -rf "$work/chart/kvlane/values" "$work/chart/kvlane/generate.py" "$work/chart/kvlane/render.sh"
packed "$work/chart" kvlane > "$out/kvlane-chart-$version.tgz"

tools=build/release-tools
[ -x "$tools/bin/cyclonedx-py" ] || .venv/bin/python -m venv "$tools"
"$tools/bin/python" -m pip install --quiet --disable-pip-version-check --require-hashes \
  -r deploy/requirements/image-tools.txt
"$tools/bin/cyclonedx-py" requirements deploy/requirements/image.txt --pyproject pyproject.toml \
  --output-reproducible --output-file "$out/kvlane-$version.cdx.json" 2> "$work/sbom.log" \
  || { cat "$work/sbom.log" >&2; die 'the bill of materials cannot be written'; }

if [ -z "$mode" ]; then
  deploy/image/build.sh
  cp build/sbom.cdx.json "$out/kvlane-image-$version.cdx.json"
fi
(cd "$out" && sha256sum -- * > SHA256SUMS)
say "in build/release:"
cat "$out/SHA256SUMS"
