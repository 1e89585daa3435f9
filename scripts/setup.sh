#!/usr/bin/env bash
# Build .venv with BFTrainer and what its demo needs (`setup.sh demo`) or everything (`setup.sh`): tests, pages, a browser.
# Run by make; does nothing when up to date.
set -euo pipefail
cd "$(dirname "$0")/.."
part=${1:-all}

say() { printf 'setup: %s\n' "$*" >&2; }
as_root() { [ "$(id -u)" = 0 ]; }

# The first Python that is new enough; Debian 12 ships 3.11.
python=""
for candidate in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
  if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    python=$candidate
    break
  fi
done
if [ -z "$python" ]; then
  say "Python 3.11 or newer is needed, but none was found. Install it, or name it: make setup PYTHON=/path/to/python3.12"
  exit 1
fi

# On Debian, venv is a package of its own.
if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
  if as_root && command -v apt-get >/dev/null; then
    say "installing python3-venv"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq python3-venv >/dev/null
  else
    say "Python's venv module is missing. Install it (Debian: apt-get install python3-venv) and run this again."
    exit 1
  fi
fi

stamp=.venv/.bftrainer-setup
want=$(cat pyproject.toml constraints.txt scripts/setup.sh | sha256sum | cut -d' ' -f1)-$("$python" -V)-$PWD
is_there() { [ -f "$1" ] && [ "$(cat "$1")" = "$want" ]; }
if is_there "$stamp" || { [ "$part" = demo ] && is_there "$stamp-demo"; }; then
  exit 0
fi
say "building .venv (a minute or two the first time)"
is_there "$stamp-demo" || "$python" -m venv --clear .venv
extras=examples,live,torch
[ "$part" = demo ] || extras=dev,docs,examples,fast,live,optuna,torch
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile -c constraints.txt)
quietly() { "$@" 2>&1 | { grep -v '^WARNING: Location .* is ignored' || true; } >&2; }
# uv takes a fifth of pip's time. PyTorch comes by pip, whose configuration may name a place that has a small build.
# Where uv cannot reach what pip reaches, pip installs everything.
quietly "${pip[@]}" uv
quietly "${pip[@]}" --no-deps torch
.venv/bin/uv pip install --quiet --python .venv/bin/python -c constraints.txt --editable ".[$extras]" 2>/dev/null || {
  say "uv cannot install the packages, so pip does"
  quietly "${pip[@]}" --editable ".[$extras]"
}
# Many files that come along are of packages' own tests, or nothing here imports them. A file that does not compile is
# for another Python.
unused='/(tests?|plotly|pip|setuptools|fontTools|pygments/lexers|networkx|graphql|mypyc?)/'
unused+='|/torch/(testing|onnx|ao|_inductor|_export|_numpy)/|/sqlalchemy/dialects/[^s]'
.venv/bin/python -m compileall -qq -j 0 -x "$unused" .venv/lib || true
.venv/bin/bftrainer --version >/dev/null
if [ "$part" = demo ]; then
  printf '%s' "$want" >"$stamp-demo"
  exit 0
fi

# The tests of the dashboard look at it in a browser; without one they are skipped, and say so.
if as_root && command -v apt-get >/dev/null && ! command -v chromium >/dev/null; then
  say "installing chromium"
  get=(env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -y -qq --no-install-recommends chromium)
  { "${get[@]}" || { apt-get update -qq && "${get[@]}"; }; } >/dev/null 2>&1 || say "chromium cannot be installed"
fi
printf '%s' "$want" >"$stamp"
