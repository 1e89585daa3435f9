#!/usr/bin/env bash
# All tests, and beside them lint, types and import rules: `scripts/test.sh CHECK PYTEST ARGUMENT...`
# What the command CHECK prints is shown when it is done. Fails if either fails; pytest's closing line comes last.
set -uo pipefail
check=$1
shift
said=$(mktemp)
trap 'rm -f "$said"' EXIT
{
  $check >"$said" 2>&1
  status=$?
  printf '\n%s\n' "$(cat "$said")"
  exit "$status"
} &
beside=$!
"$@"
tests=$?
wait "$beside" || { echo "'$check' failed: see above" >&2; exit 1; }
exit "$tests"
