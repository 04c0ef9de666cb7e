#!/usr/bin/env bash
# Runs torch.matmul and a torch.distributed collective on this machine: sets the environment up, then `python -m pyrocshmem reference`.
set -euo pipefail
unset CDPATH
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

# Help is answered before a set-up that may take minutes.
for arg in "$@"; do
  case $arg in
    -h | --help)
      cat "$here/usage.txt"
      exit 0
      ;;
  esac
done

# shellcheck source=/dev/null
source "$here/../activate.sh"
PYROCSHMEM_SCRIPT=$0 exec python -m pyrocshmem reference "$@"
