#!/usr/bin/env bash
# Runs a command, or a shell, in apptainer/pyrocshmem.sif with this checkout in place of the copy in the image.
set -euo pipefail
unset CDPATH
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd)
image=$root/apptainer/pyrocshmem.sif

case ${1:-} in
  -h | --help)
    cat <<'USAGE'
Usage: ./apptainer/run.sh [COMMAND [ARGUMENTS]]

Runs COMMAND, by default a shell, in the image with this checkout as its folder and activate.sh sourced.

Example:
  ./apptainer/run.sh ./run.sh -n 4 -c all_reduce
USAGE
    exit 0
    ;;
esac

container=$(command -v apptainer || command -v singularity) || {
  echo "apptainer/run.sh: neither apptainer nor singularity is on PATH; docs/setup.md tells how to use Docker" >&2
  exit 1
}
if [ ! -e "$image" ]; then
  echo "apptainer/run.sh: there is no $image; build it with apptainer/build.sh" >&2
  exit 1
fi

gpus=()
[ ! -e /dev/kfd ] || gpus=(--rocm)
[ "$#" -gt 0 ] || set -- bash
# PYTHONPATH of the image would put its copy of the project before this checkout.
# shellcheck disable=SC2016 # expanded by the inner shell
exec "$container" exec "${gpus[@]}" --bind "$root" --pwd "$root" "$image" \
  bash -c 'unset PYTHONPATH; source ./activate.sh && exec "$@"' bash "$@"
