#!/usr/bin/env bash
# Builds apptainer/pyrocshmem.sif from pyrocshmem.def. Options go to `apptainer build`, for instance --fakeroot.
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."

case ${1:-} in
  -h | --help)
    cat <<'USAGE'
Usage: ./apptainer/build.sh [OPTIONS OF apptainer build]

Builds apptainer/pyrocshmem.sif: ROCm's PyTorch image, build tools and this project. Needs tens of GB and a network.

Example:
  ./apptainer/build.sh --fakeroot
USAGE
    exit 0
    ;;
esac

container=$(command -v apptainer || command -v singularity) || {
  echo "apptainer/build.sh: neither apptainer nor singularity is on PATH; docs/setup.md tells how to use Docker" >&2
  exit 1
}
# The name moves into place once the image is whole: a build that was cut short leaves the last good one.
"$container" build --force "$@" apptainer/pyrocshmem.new.sif apptainer/pyrocshmem.def
mv -f apptainer/pyrocshmem.new.sif apptainer/pyrocshmem.sif
echo "built $PWD/apptainer/pyrocshmem.sif"
