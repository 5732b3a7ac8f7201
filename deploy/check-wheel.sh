#!/usr/bin/env bash
# Build the wheel, install it without the checkout, and use all of it: `make wheel`, and CI.
# The packages are those of deploy/requirements/dev.txt, but only the ones which the wheel asks for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
root=$PWD
folder=$root/build/wheel

die() { printf 'wheel: %s\n' "$@" >&2; exit 1; }

rm -rf "$folder" build/lib build/bdist.*
mkdir -p "$folder/elsewhere"
.venv/bin/python -m pip wheel --quiet --disable-pip-version-check --no-deps --no-build-isolation \
  --wheel-dir "$folder" .
wheel=$(echo "$folder"/kvlane-*.whl)
.venv/bin/uv venv --quiet --python .venv/bin/python "$folder/env"
.venv/bin/uv pip install --quiet --python "$folder/env/bin/python" \
  --constraint deploy/requirements/dev.txt "kvlane @ file://$wheel"

# No module of the checkout is on the path here. The folders are another program's, of the same names.
cd "$folder/elsewhere"
for name in app streams indexer workbench; do
  mkdir "$name"
  echo 'raise ImportError("the folder of another program")' | tee "$name/__init__.py" >"$name/router.py"
done
bin=$folder/env/bin
"$bin/kvlane" --version
"$bin/python" "$root/deploy/wheel_names.py"

# Without a broker a process ends with an error that names its setting; `up` needs no package beyond the wheel.
unset "${!KVLANE_@}"
starts() {
  local message
  message=$("$@" 2>&1 </dev/null) && die "$* ends without an error"
  [[ $message == *"KVLANE_BOOTSTRAP_SERVERS"* ]] || die "$* does not start:" "$message"
}
for process in gateway preprocessor router worker collector indexer standalone; do
  starts "$bin/kvlane" run "$process"
done
starts "$bin/faststream" run kvlane.app.router:app
starts "$bin/kvlane" up --broker env
message=$("$bin/kvlane" bench chaos --kills 1 2>&1) && die "kvlane bench ends without an error"
[[ $message == *"repository of kvlane"* ]] || die "kvlane bench does not say where the benchmarks are:" "$message"

cp -r "$root/examples" examples
"$bin/python" examples/index_alone.py >/dev/null
starts "$bin/faststream" run examples.custom_engine:app
"$bin/python" -c 'import examples.faststream_service, examples.publish_and_follow'

# A client of Kafka alone needs the packages that README names.
"$root/.venv/bin/uv" venv --quiet --python "$root/.venv/bin/python" "$folder/client"
read -ra packages < <(sed -n 's/^pip install \(aiokafka .*\)$/\1/p' "$root/README.md")
"$root/.venv/bin/uv" pip install --quiet --python "$folder/client/bin/python" \
  --constraint "$root/deploy/requirements/dev.txt" "${packages[@]}"
"$root/.venv/bin/uv" pip install --quiet --python "$folder/client/bin/python" --no-deps "kvlane @ file://$wheel"
"$folder/client/bin/python" -c 'import examples.publish_and_follow'

"$root/.venv/bin/uv" pip install --quiet --python "$bin/python" \
  --constraint "$root/deploy/requirements/dev.txt" "kvlane[demo] @ file://$wheel"
"$bin/kvlane" demo --broker memory "Hello from the wheel" </dev/null
echo "the demo ran from $(basename "$wheel")"
