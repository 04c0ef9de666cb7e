#!/usr/bin/env bash
# The records of benchmarks/results, made anew on all GPUs of this machine, a file for each set of cases:
#   benchmarks/records.sh FOLDER [SET...]      default: all sets, see below
# Every provider is timed; those that can't run here say why in the records. ITERS: samples a provider, default 30; fewer
# for a quick look. COMMIT=... where git can't tell it: eight digits of the hash or more, which seed the drawn sets.
# Then: python -m pyrocshmem bench report FOLDER/*.jsonl
set -uo pipefail
unset CDPATH
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

declare -A commands=(
  [models]="all --shapes models:commit"
  [models-fp32]="gemm --shapes models:commit --dtype float32 -n 1"
  [llama3]="all --shapes llama3"
  [sweep]="all --shapes sweep"
  [decode]="all --shapes decode"
  [batches]="all --shapes batches"
  [collectives]="collectives"
  [layers]="layers"
  [corpus]="gemm --shapes stream-k-corpus -n 1"
  [corpus-64]="gemm --shapes stream-k-corpus-64 -n 1"
)
sets=(models models-fp32 llama3 sweep decode batches collectives layers corpus corpus-64)
# What outlives this hangs.
limit_s=3600

usage="Usage: benchmarks/records.sh FOLDER [SET...]      sets: ${sets[*]}"
case ${1:-} in
  -h | --help)
    echo "$usage"
    exit 0
    ;;
  "" | -*)
    echo "$usage" >&2
    exit 2
    ;;
esac
folder=$1
shift
for name in "$@"; do
  [ -n "${commands[$name]:-}" ] || { echo "no set $name. $usage" >&2; exit 2; }
done
[ $# = 0 ] || sets=("$@")

# shellcheck source=activate.sh
source "$root/activate.sh" || exit 1
failed=()
for name in "${sets[@]}"; do
  read -ra command <<<"${commands[$name]}"
  printf '\n===== %s =====\n' "$name"
  timeout --kill-after=20 "$limit_s" python -m pyrocshmem bench "${command[@]}" --iters "${ITERS:-30}" \
    ${COMMIT:+--commit "$COMMIT"} --json "$folder/$name.jsonl" || failed+=("$name")
done
[ "${#failed[@]}" = 0 ] || { echo "something was wrong in: ${failed[*]}"; exit 1; }
