#!/usr/bin/env bash
# What BFTrainer can tell a computing centre, shown on a synthetic Summit: how much of it stands idle, and what would have
# been trained on that. Run by `make demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH=$PWD/.venv/bin:$PATH
mkdir -p demo

run() {
  printf '\n$ %s\n' "$*"
  "$@"
}

cat >demo/trainers.yaml <<'YAML'
# A hyperparameter search: 150 trials of one model, each of them a hundred epochs of ImageNet.
defaults: {min_nodes: 1, max_nodes: 64, scale_up_s: 18, scale_down_s: 12, samples: 130e6}
trainers:
  - {hpo: 150, model: ShuffleNet, every_s: 36}
YAML

run bftrainer trace synth --profile summit --nodes 4608 --hours 336 --seed 1 -o demo/summit.parquet
run bftrainer trace stats demo/summit.parquet --plot demo/summit.png
run bftrainer simulate --trace demo/summit.parquet --workload demo/trainers.yaml --nodes 1024 --report demo/report.html
printf '\nLook at demo/summit.png and demo/report.html. With a log of your own scheduler:\n'
printf '  .venv/bin/bftrainer trace import YOUR_LOG -o mine.parquet\n'
printf '  .venv/bin/bftrainer simulate --trace mine.parquet --workload demo/trainers.yaml\n'
