#!/usr/bin/env bash
# The records of benchmarks/results, made on all GPUs of this machine, a file for each set of cases:
#   benchmarks/records.sh FOLDER [SET...]      default: all sets, see below
# A second run goes on where the first ended, or was ended. Records of other code or another machine are refused; sets that
# only print are made anew.
# Every provider is timed; those that can't run here say why, in the records of `bench`. PROVIDERS: only these of `bench`,
# with commas between. ITERS: samples a provider, default 30; fewer for a quick look. COMMIT=... where git can't tell it:
# eight digits of the hash or more, which seed the drawn sets. LIMIT_S: seconds that a set may take, default an hour.
# Then: python -m pyrocshmem bench report FOLDER/*.jsonl
set -uo pipefail
unset CDPATH
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

float8="python -m pyrocshmem.benchmarks.float8 --shapes models:commit"
float8_llama3="python -m pyrocshmem.benchmarks.float8 --shapes llama3"
sanitizer="compute-sanitizer --report-api-errors no --target-processes all"
# Of `python -m pyrocshmem bench`, whose records are lines of JSON; and others, which print.
declare -A benched=(
  [models]="all --shapes models:commit"
  [models-fp32]="gemm --shapes models:commit --dtype float32 -n 1"
  [llama3]="all --shapes llama3"
  [sweep]="all --shapes sweep"
  [decode]="all --shapes decode"
  [batches]="all --shapes batches"
  [collectives]="collectives"
  [layers]="layers"
  [narrow]="gemm --shapes benchmarks/narrow.toml -n 1"
  [corpus]="gemm --shapes stream-k-corpus -n 1"
  [corpus-64]="gemm --shapes stream-k-corpus-64 -n 1"
)
declare -A printed=(
  [float8-gemm-tensorwise]="$float8 --recipe tensorwise"
  [float8-gemm-rowwise]="$float8 --recipe rowwise"
  [float8-gemm-blockwise]="$float8 --recipe blockwise"
  [float8-rowwise]="$float8 --recipe rowwise -n 2"
  [float8-blockwise]="$float8 --recipe blockwise -n 2"
  [float8-gemm-rowwise-llama3]="$float8_llama3 --recipe rowwise"
  [float8-gemm-blockwise-llama3]="$float8_llama3 --recipe blockwise"
  [float8-rowwise-llama3]="$float8_llama3 --recipe rowwise -n 2"
  [float8-blockwise-llama3]="$float8_llama3 --recipe blockwise -n 2"
  [first-calls]="python -m pyrocshmem.benchmarks.first_calls -n 2"
  [tests]="env PYROCSHMEM_BACKEND=gpu tests/run.sh"
  [memcheck]="$sanitizer --tool memcheck python -m tests.sanitize --ranks 2"
  [synccheck]="$sanitizer --tool synccheck python -m tests.sanitize --ranks 2"
  [stress]="python -m tests.stress --minutes 10"
)
sets=(models models-fp32 llama3 sweep decode batches collectives layers narrow corpus corpus-64)
sets+=(float8-gemm-tensorwise float8-gemm-rowwise float8-gemm-blockwise float8-rowwise float8-blockwise)
sets+=(float8-gemm-rowwise-llama3 float8-gemm-blockwise-llama3 float8-rowwise-llama3 float8-blockwise-llama3 first-calls)
sets+=(tests memcheck synccheck stress)

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
  [ -n "${benched[$name]:-}${printed[$name]:-}" ] || { echo "no set $name. $usage" >&2; exit 2; }
done
[ $# = 0 ] || sets=("$@")

# shellcheck source=activate.sh
source "$root/activate.sh" || exit 1
mkdir -p "$folder" && folder=$(cd -- "$folder" && pwd) || exit 1
cd -- "$root" || exit 1
# Records say the command: without where the project lies.
folder=${folder#"$root"/}
sources=$(python -c 'from pyrocshmem.benchmarks.sources import digest; print(digest())') || exit 1
# What outlives it hangs.
limited=(timeout --kill-after=20 "${LIMIT_S:-3600}")

# The last line of what a set printed that is complete.
complete="complete, of sources $sources"

# print_set NAME COMMAND...: into its file, which begins with the command.
print_set() {
  local file=$folder/$1.txt
  shift
  [ "$(tail -n 1 "$file" 2>/dev/null)" != "$complete" ] || { echo "is complete"; return; }
  echo "$*" >"$file"
  "${limited[@]}" "$@" | tee -a "$file"
  [ "${PIPESTATUS[0]}" = 0 ] || return 1
  echo "$complete" >>"$file"
}

failed=()
for name in "${sets[@]}"; do
  printf '\n===== %s =====\n' "$name"
  if [ -n "${benched[$name]:-}" ]; then
    read -ra command <<<"${benched[$name]}"
    "${limited[@]}" python -m pyrocshmem bench "${command[@]}" --iters "${ITERS:-30}" \
      ${COMMIT:+--commit "$COMMIT"} ${PROVIDERS:+--providers "$PROVIDERS"} \
      --json "$folder/$name.jsonl" --resume || failed+=("$name")
  else
    read -ra command <<<"${printed[$name]}"
    [[ $name != float8* ]] || [ -z "${COMMIT:-}" ] || command+=(--commit "$COMMIT")
    print_set "$name" "${command[@]}" || failed+=("$name")
  fi
done
[ "${#failed[@]}" = 0 ] || { echo "something was wrong in, or ended: ${failed[*]}"; exit 1; }
