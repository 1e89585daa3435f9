#!/usr/bin/env bash
# Tests with other people's frameworks, each in an environment of its own: `scripts/frameworks.sh [OPTION] [NAME...]`
#   --install  only build the environments, as build/frameworks/NAME
#   --short    only the tests with the marker `short`, for frameworks that have one: a part of `make test`. Frameworks
#              with one environment are tested in one process: most of the time goes into importing them
# A framework is a file tests/frameworks/requirements-NAME.txt with its packages, and tests/frameworks/test_NAME*.py.
# An environment adds these packages to those of .venv, which it uses too. Frameworks with the same file share one.
# Exit status: 0 all passed, 1 a test failed, 2 wrong use, 3 packages could not be installed.
set -uo pipefail
cd "$(dirname "$0")/.."
rooms=build/frameworks

say() { printf 'frameworks: %s\n' "$*" >&2; }

# Build the environment of a framework, unless there is one with these packages.
install() {
  local name=$1 packages=tests/frameworks/requirements-$1.txt want room site
  want=$(cat .venv/.bftrainer-setup scripts/frameworks.sh "$packages" | sha256sum)
  room=$rooms/env-${want:0:12}
  mkdir -p "$rooms"
  (
    flock 9 # tests that run at once may want the same one
    if [ ! -f "$room/.done" ]; then
      say "installing the packages of $name"
      .venv/bin/python -m venv --clear --without-pip "$room" || exit 1
      site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
      printf "import site; site.addsitedir('%s')\n" "$site" >"${room}${site#"$PWD/.venv"}/main-environment.pth"
      # The file names every package, so none is looked for. Where uv cannot reach what pip reaches, pip installs.
      .venv/bin/uv pip install --quiet --no-deps --python "$room/bin/python" -r "$packages" 2>/dev/null ||
        "$room/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-deps -r "$packages" >&2 ||
        exit 1
      touch "$room/.done"
    fi
    ln -sfn "env-${want:0:12}" "$rooms/$name"
    for room in "$rooms"/env-*; do # those of former packages
      [ -n "$(find "$rooms" -maxdepth 1 -lname "${room##*/}")" ] || rm -rf "$room"
    done
  ) 9>"$rooms/.lock"
}

mode=all
case ${1:-} in
  --install | --short) mode=${1#--}; shift ;;
  -*) say "there is no option $1"; exit 2 ;;
esac
names=("$@")
if [ ${#names[@]} = 0 ]; then
  for file in tests/frameworks/requirements-*.txt; do
    name=${file##*/requirements-}
    names+=("${name%.txt}")
  done
fi
[ -f .venv/.bftrainer-setup ] || { say 'there is no .venv yet: run `make setup` first'; exit 2; }
# Run test files in the environment of a framework, and note a failure.
run_tests() {
  local name=$1
  shift
  HF_HUB_OFFLINE=1 WANDB_MODE=offline "$rooms/$name/bin/python" -m pytest -p no:cacheprovider "$@" ||
    { [ "$status" != 0 ] || status=1; }
}

status=0
declare -A short=() # files with short tests, by environment
for name in "${names[@]}"; do
  [ -f "tests/frameworks/requirements-$name.txt" ] || { say "there is no requirements-$name.txt"; exit 2; }
  files=(tests/frameworks/test_"$name"*.py)
  if [ "$mode" = short ]; then
    mapfile -t files < <(grep -l 'mark\.short' "${files[@]}")
    [ ${#files[@]} != 0 ] || continue
  fi
  install "$name" || { say "the packages of $name cannot be installed: see above. pip needs a network"; status=3; continue; }
  case $mode in
    short) short[$(readlink "$rooms/$name")]+=" ${files[*]}" ;;
    all) say "testing $name"; run_tests "$name" "${files[@]}" ;;
  esac
done
for room in "${!short[@]}"; do
  # shellcheck disable=SC2086 # the names of test files have no spaces
  run_tests "$room" -m short ${short[$room]}
done
exit "$status"
