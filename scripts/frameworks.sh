#!/usr/bin/env bash
# Tests with other people's frameworks, each in an environment of its own: `scripts/frameworks.sh [NAME...]`
# A framework is a file tests/frameworks/requirements-NAME.txt with its packages, and tests/frameworks/test_NAME*.py.
set -uo pipefail
cd "$(dirname "$0")/.."
names=("$@")
if [ ${#names[@]} = 0 ]; then
  for file in tests/frameworks/requirements-*.txt; do
    name=${file##*/requirements-}
    names+=("${name%.txt}")
  done
fi
status=0
for name in "${names[@]}"; do
  packages=tests/frameworks/requirements-$name.txt
  [ -f "$packages" ] || { echo "there is no $packages" >&2; exit 2; }
  room=build/frameworks/$name
  want=$(cat pyproject.toml constraints.txt "$packages" | sha256sum | cut -d' ' -f1)
  if [ "$(cat "$room/.done" 2>/dev/null)" != "$want" ]; then
    echo "frameworks: installing $name" >&2
    "${PYTHON:-python3}" -m venv --clear "$room" &&
      "$room/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt \
        --editable '.[live,torch]' pytest pytest-timeout -r "$packages" &&
      printf '%s' "$want" >"$room/.done" || { status=1; continue; }
  fi
  echo "frameworks: $name"
  HF_HUB_OFFLINE=1 WANDB_MODE=offline "$room/bin/python" -m pytest -q -p no:cacheprovider \
    tests/frameworks/test_"$name"*.py || status=1
done
exit "$status"
