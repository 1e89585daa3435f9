#!/usr/bin/env bash
# What BFTrainer can tell a computing centre about its idle nodes, shown on a synthetic Summit. Run by `make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
mkdir -p demo

run() {
  printf '\n$ %s\n' "$*"
  "$@"
}

run bftrainer trace synth --profile summit --nodes 4608 --hours 336 --seed 1 -o demo/summit.parquet
run bftrainer trace stats demo/summit.parquet --plot demo/summit.png
printf '\nThe trace and the figure are in demo/. With a log of your own scheduler:\n'
printf '  .venv/bin/bftrainer trace import YOUR_LOG -o mine.parquet\n'
printf '  .venv/bin/bftrainer trace stats mine.parquet --plot mine.png\n'
