#!/usr/bin/env bash
# One case of an op on all GPUs of this machine, or on 2 CPU ranks: benchmarks/launch.sh OP M N K [--dtype=... --iters=...]
# M N K of one rank's product; further options are those of `python -m pyrocshmem bench OP`.
set -euo pipefail
unset CDPATH
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)

usage="Usage: benchmarks/launch.sh OP M N K [OPTIONS]      Example: benchmarks/launch.sh gemm_all_reduce 4096 4096 1792 --dtype=float16 --iters=10"
case ${1:-} in
  -h | --help)
    echo "$usage"
    exit 0
    ;;
esac
for size in "${2:-}" "${3:-}" "${4:-}"; do
  if ! [[ $size =~ ^[1-9][0-9]*$ ]]; then
    echo "$usage" >&2
    exit 2
  fi
done

# shellcheck source=activate.sh
source "$root/activate.sh"
exec python -m pyrocshmem bench "$1" --shapes "$2,$3,$4" "${@:5}"
