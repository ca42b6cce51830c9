#!/usr/bin/env bash
# Installs Melting Pot's substrates from PyPI alone, without its bots and TensorFlow.
#
#   scripts/install_meltingpot.sh [python] [pip arguments...]
#
# The build of dm-meltingpot downloads bots that substrates have no use for, unless it finds them in TMPDIR: there it is
# given an empty archive of them.
set -euo pipefail
python="${1:-python}"
shift || true

version=2.4.1
assets=2.3.0
if "$python" -c "import importlib.metadata as m, sys; sys.exit(m.version('dm-meltingpot') != '$version')" 2>/dev/null; then
  exit 0
fi

"$python" -m pip install --disable-pip-version-check --quiet "$@" \
  dmlab2d dm-env ml-collections immutabledict reactivex dm-tree absl-py networkx

folder="$(mktemp -d)"
trap 'rm -r "$folder"' EXIT
mkdir -p "$folder/empty/assets/saved_models"
tar -C "$folder/empty" -czf "$folder/meltingpot-assets-$assets.tar.gz" assets
TMPDIR="$folder" "$python" -m pip install --disable-pip-version-check --quiet --no-cache-dir --no-deps \
  "dm-meltingpot==$version"
