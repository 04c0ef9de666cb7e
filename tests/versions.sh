#!/usr/bin/env bash
# Runs the tests with one version of torch, and the Triton that it asks for, in an environment made for it.
#
#   tests/versions.sh 2.14.1                                 all of tests/run.sh
#   tests/versions.sh 2.11.0 --max-tier 1 tests/stream_k     arguments after the version go to tests/run.sh
#   VERSIONS_ENV_DIR=/scratch tests/versions.sh 2.14.1       environments in another folder than the repository's
#
# The environment is .venv-torchVERSION in that folder. One that has this torch and all that the tests need is used as it
# is, whoever made it; what is missing is installed. torch is the CPU build if pip's indexes have one. Otherwise it is
# the default wheel with CUDA's libraries, which it loads when it is imported, GPU or not: 5 GB to download, 7 GB of disk.
# A CPU build asks for no Triton and gets the newest that pyproject.toml allows.
# docs/setup.md has the table of what passed. The last line and the exit status are those of tests/run.sh; 2: no such version.
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
venv=$(cd -- "${VERSIONS_ENV_DIR:-.}" && pwd)/.venv-torch$version || fail "VERSIONS_ENV_DIR: no folder '$VERSIONS_ENV_DIR'"

# lacking: what the environment has to have and hasn't, a requirement a line. torch is held to VERSION, whatever the build.
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
for requirement in project["dependencies"] + [r for extra in ("test", "plot") for r in project["optional-dependencies"][extra]]:
    if installed(requirement.partition(">=")[0]) is None:
        print(requirement)
PYTHON
}

install() { "$venv/bin/python" -m pip install --quiet -c constraints.txt "$@"; }

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv" || fail "could not make $venv"
mapfile -t missing < <(lacking)
if [ "${#missing[@]}" -gt 0 ]; then
  printf 'tests/versions.sh: installing torch %s into %s\n' "$version" "$venv" >&2
  # Asked for by name: a registry's plain version is mostly a CUDA build.
  if install --dry-run --no-deps "torch==$version+cpu" >/dev/null 2>&1; then
    missing+=("torch==$version+cpu")
  fi
  install "${missing[@]}" || fail "pip failed (above)"
fi

env VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH" python - <<'PYTHON' || fail "torch or Triton can't be imported (above)"
import torch, triton
print(f"torch {torch.__version__}, Triton {triton.__version__}", flush=True)
PYTHON
exec env VIRTUAL_ENV="$venv" PATH="$venv/bin:$PATH" PYROCSHMEM_NO_VENV=1 tests/run.sh "$@"
