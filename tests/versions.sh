#!/usr/bin/env bash
# Runs the tests with one version of torch, and the Triton that it asks for, in an environment made for it.
#
#   tests/versions.sh 2.14.1                                 all of tests/run.sh
#   tests/versions.sh 2.11.0 --max-tier 1 tests/stream_k     arguments after the version go to tests/run.sh
#   VERSIONS_ENV_DIR=/scratch tests/versions.sh 2.14.1       the environment is in another folder than this repository
#
# The environment is .venv-torchVERSION. One that is there, has this torch and lacks nothing that the tests need is used
# as it is, whoever made it; otherwise pip installs what is missing. Of torch it takes the CPU build where its indexes
# have one, which asks for no Triton: pip then takes the newest that pyproject.toml allows. Elsewhere it takes the
# default wheel, its Triton and all of CUDA's libraries, since torch loads them when it is imported, on a machine without
# a GPU, too: gigabytes to download, 6 GB on the disk.
#
# docs/setup.md says what passed. The last line and the exit status are those of tests/run.sh; 2: no such environment.
set -uo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 2

fail() {
  printf 'tests/versions.sh: %s\n' "$*" >&2
  exit 2
}

version=${1:-}
case $version in
  -h | --help)
    sed -n '2,/^set/ s/^# \{0,1\}//p' tests/versions.sh # the words above
    exit 0
    ;;
  [0-9]*.[0-9]*.[0-9]*) shift ;;
  *) fail "name a version of torch with its three numbers, as 2.14.1; got '$version'" ;;
esac
folder=$(cd -- "${VERSIONS_ENV_DIR:-.}" && pwd) || fail "VERSIONS_ENV_DIR is no folder: '$VERSIONS_ENV_DIR'"
venv=$folder/.venv-torch$version

# What the environment has to have and hasn't, a requirement a line. Of torch, this version, whatever the build.
lacking() {
  "$venv/bin/python" - "$version" <<'PYTHON'
import sys, tomllib
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

def installed(name):
    try:
        return version(name)
    except PackageNotFoundError:
        return None

project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
if (installed("torch") or "").partition("+")[0] != sys.argv[1]:
    print("torch==" + sys.argv[1])
extras = project["optional-dependencies"]
for requirement in project["dependencies"] + extras["test"] + extras["plot"]:
    if installed(requirement.partition(">=")[0]) is None:
        print(requirement)
PYTHON
}

install() { "$venv/bin/python" -m pip install --quiet -c constraints.txt "$@"; }

[ -x "$venv/bin/python" ] || python3 -m venv "$venv" || fail "could not make $venv"
mapfile -t missing < <(lacking)
if [ "${#missing[@]}" -gt 0 ]; then
  printf 'tests/versions.sh: installing %s into %s\n' "${missing[*]}" "$venv" >&2
  # Asked for by its whole name: the CUDA build's may be the higher version. A build that is there stays.
  if [ "${missing[0]}" = "torch==$version" ] && install --dry-run --no-deps "torch==$version+cpu" >/dev/null 2>&1; then
    missing+=("torch==$version+cpu")
  fi
  install "${missing[@]}" || fail "pip failed (above)"
fi

export VIRTUAL_ENV=$venv PATH=$venv/bin:$PATH
python -c 'import torch, triton; print(f"torch {torch.__version__}, Triton {triton.__version__}")' ||
  fail "torch or Triton can't be imported (above)"
exec tests/run.sh "$@"
