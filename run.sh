#!/usr/bin/env bash
# Runs a fused op on this machine, setting the environment up first: ./run.sh -n 4 -c all_reduce
# The options are those of `python -m pyrocshmem run`; stream_k/run/usage.txt is the help of both.
set -euo pipefail
unset CDPATH
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
usage=$root/stream_k/run/usage.txt

known=$(grep -oE -- '--?[a-z][a-z-]*' "$usage" | tr '\n' ' ')

# Help, and a mistyped option, are answered before a set-up that may take minutes.
for arg in "$@"; do
  case $arg in
    -h | --help)
      cat "$usage"
      exit 0
      ;;
    --?*) option=${arg%%=*} ;;
    -[[:alpha:]]*) option=${arg:0:2} ;; # a value may follow at once: -n4
    *) continue ;;
  esac
  if [[ " $known " != *" $option "* ]]; then
    printf "run.sh: no such option: '%s'. Try './run.sh --help'.\n" "$option" >&2
    exit 2
  fi
done

# shellcheck source=activate.sh
source "$root/activate.sh"
PYROCSHMEM_SCRIPT=$0 exec python -m pyrocshmem run "$@"
