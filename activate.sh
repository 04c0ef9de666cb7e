# shellcheck shell=bash
# Sets this shell up for the project:  source activate.sh      (bash or zsh; `bash activate.sh` only prepares)
#
# It uses, in this order:
#   1. an active environment (venv, conda, modules, container) whose Python has torch and Triton, or whatever is active
#      when PYROCSHMEM_NO_VENV=1: nothing is installed;
#   2. this machine's CUDA or ROCm build of torch with its Triton: `.venv` on top of it, holding only what is missing;
#   3. `.venv` with everything, in the versions of constraints.txt. This takes minutes, once.
# Then it builds the C library finegrained_alloc if a source is newer, and puts this folder on PYTHONPATH.
# When all is there it takes a fraction of a second. `.venv` is brought up to date when pyproject.toml, constraints.txt
# or the folder's place changes; `rm -rf .venv` starts afresh.
#
# The preparation runs in a child bash (this same file, executed), so none of its settings reach the calling shell.

if [ -z "${BASH_VERSION:-}${ZSH_VERSION:-}" ]; then
  echo 'activate.sh: this shell is neither bash nor zsh; run.sh and tests/run.sh can be called from any' >&2
  return 1
fi
if [ -n "${ZSH_VERSION:-}" ]; then
  # Only zsh can parse this expansion.
  eval '_pyrocshmem_file=${(%):-%x}'
else
  _pyrocshmem_file=${BASH_SOURCE[0]}
fi

if [ -n "${ZSH_VERSION:-}" ] || [ "$_pyrocshmem_file" != "$0" ]; then
  _pyrocshmem_root=$(unset CDPATH && cd -- "$(dirname -- "$_pyrocshmem_file")" && pwd)
  if _pyrocshmem_venv=$(bash "$_pyrocshmem_root/activate.sh"); then
    if [ -n "$_pyrocshmem_venv" ] && [ "${VIRTUAL_ENV:-}" != "$_pyrocshmem_venv" ]; then
      # shellcheck source=/dev/null
      . "$_pyrocshmem_venv/bin/activate"
    fi
    case ":${PYTHONPATH:-}:" in
      *":$_pyrocshmem_root:"*) ;;
      *) export PYTHONPATH="$_pyrocshmem_root${PYTHONPATH:+:$PYTHONPATH}" ;;
    esac
    # Every comparison of this project is without NVLink multicast, and some machines must not use it. Yours wins.
    export NCCL_NVLS_ENABLE="${NCCL_NVLS_ENABLE:-0}" NVSHMEM_DISABLE_NVLS="${NVSHMEM_DISABLE_NVLS:-1}"
    export TORCH_SYMM_MEM_DISABLE_MULTICAST="${TORCH_SYMM_MEM_DISABLE_MULTICAST:-1}"
    unset _pyrocshmem_file _pyrocshmem_root _pyrocshmem_venv
    return 0
  fi
  unset _pyrocshmem_file _pyrocshmem_root _pyrocshmem_venv
  return 1
fi

# From here on: executed, not sourced. Messages go to stderr; stdout is the virtual environment to enter, if any.
set -euo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
root=$PWD
venv=$root/.venv
runtime_modules=(numpy typer rich)
other_modules=(pytest pytest_timeout xdist hypothesis matplotlib)

say() { printf 'activate.sh: %s\n' "$*" >&2; }
fail() {
  say "$@"
  exit 1
}

# probe PYTHON MODULE...: one line of three numbers and words, without importing torch (that takes seconds):
# is it an environment of its own, are torch and Triton there, are they a supported build for GPUs; missing modules.
probe() {
  "$1" - "${@:2}" <<'PYTHON'
import re, sys
from importlib.util import find_spec
from pathlib import Path

def numbers(text, pattern):
    found = re.search(pattern, text, re.M)
    return [tuple(map(int, part.split("."))) for part in found.groups()] if found else [(0,)]

def text_of(name, file):
    spec = find_spec(name)
    path = Path(spec.origin).parent / file if spec and spec.origin else None
    return path.read_text() if path and path.exists() else ""

def in_window(name, text):
    low, high = numbers(Path("pyproject.toml").read_text(), name + r">=(\d+\.\d+),<(\d+\.\d+)")
    return low <= numbers(text, r"^__version__\s*=\s*['\"](\d+\.\d+)")[0] < high

torch, triton = text_of("torch", "version.py"), text_of("triton", "__init__.py")
gpus = re.search(r"^(cuda|hip)\b[^=\n]*=\s*['\"]", torch, re.M) and in_window("torch", torch) and in_window("triton", triton)
missing = [name for name in sys.argv[1:] if find_spec(name) is None]
print(int(sys.prefix != sys.base_prefix), int(bool(torch and triton)), int(bool(gpus)), *missing)
PYTHON
}

in_container_or_modules() {
  [ -n "${CONDA_PREFIX:-}${APPTAINER_CONTAINER:-}${SINGULARITY_CONTAINER:-}${LOADEDMODULES:-}" ] ||
    [ -e /.dockerenv ] || [ -e /run/.containerenv ]
}

# No environment is active but perhaps our own.
in_plain_shell() { [ "${VIRTUAL_ENV:-$venv}" = "$venv" ] && ! in_container_or_modules; }

# Whether the active environment is to be left as it is. Says what it lacks.
use_active_environment() {
  local own both missing
  if [ "${PYROCSHMEM_NO_VENV:-}" != 1 ]; then
    [ "${VIRTUAL_ENV:-}" != "$venv" ] && command -v python >/dev/null || return 1
    read -r own both _ missing < <(probe python "${runtime_modules[@]}" 2>/dev/null) || return 1
    [ "$both" = 1 ] || return 1
    [ "$own" = 1 ] || in_container_or_modules || return 1
  elif ! command -v python >/dev/null; then
    say "PYROCSHMEM_NO_VENV=1, but there is no command 'python' on PATH: the scripts need one that has torch and Triton"
    return 0
  else
    read -r own both _ missing < <(probe python "${runtime_modules[@]}") || return 0
    [ "$both" = 1 ] || missing="torch or triton $missing"
  fi
  [ -z "$missing" ] || say "$(command -v python) lacks: $missing. Nothing is installed into an active environment:" \
    "do it yourself (pip install ...), or leave the environment for a .venv"
}

find_python() {
  local candidate
  for candidate in python3 python python3.13 python3.12 python3.11 python3.14; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  fail "needs Python 3.11 or newer; found $(python3 --version 2>&1 || echo none)"
}

# What .venv must have been made from. The interpreter's version is read from the venv: starting Python costs too much here.
stamp() {
  echo "$root"
  cat pyproject.toml constraints.txt | cksum
  grep -i '^version' "$venv/pyvenv.cfg"
}

is_current() {
  [ -x "$venv/bin/python" ] && [ -f "$venv/stamp" ] && [ "$(stamp 2>/dev/null)" = "$(cat "$venv/stamp")" ]
}

make_venv() {
  local python both_for_gpus missing quiet=()
  # Every `.venv` that this script makes has the lock beside it.
  [ -e "$root/.venv.lock" ] || [ ! -e "$venv" ] ||
    fail "'.venv' is not of this script's making, and stays as it is: activate it and set PYROCSHMEM_NO_VENV=1, or move it"
  python=$(find_python)
  # Two shells may come here at once. The lock belongs to descriptor 9 and goes when this script and its children end.
  exec 9>"$root/.venv.lock" || fail "can't write to $root; set PYROCSHMEM_NO_VENV=1 to use the active Python as it is"
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
  is_current && return

  [ -t 2 ] || quiet=(--quiet)
  read -r _ _ both_for_gpus missing < <(probe "$python" "${runtime_modules[@]}" "${other_modules[@]}")
  missing=${missing/xdist/pytest-xdist} # the one whose package has another name
  # A folder that was moved, or a creation that was cut short, can't be mended by pip.
  if [ "$(cat "$venv/root" 2>/dev/null)" != "$root" ] || ! [ -x "$venv/bin/python" ]; then
    say "making .venv with $("$python" --version)"
    rm -rf "$venv"
    local site=()
    [ "$both_for_gpus" = 0 ] || site=(--system-site-packages)
    "$python" -m venv "${site[@]}" "$venv" >&2 ||
      fail "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
    echo "$root" >"$venv/root"
  fi
  rm -f "$venv/stamp"
  if grep -qi '^include-system-site-packages *= *true' "$venv/pyvenv.cfg"; then
    say "using this machine's torch and Triton; installing ${missing:-nothing}"
    # Never torch or Triton: pip would replace a ROCm build, whose Triton goes by another name there.
    # shellcheck disable=SC2086 # a list of module names, which pip takes for the packages (_ and - are the same)
    [ -z "$missing" ] || "$venv/bin/python" -m pip install "${quiet[@]}" -c constraints.txt $missing >&2 || pip_failed
  else
    say "installing the project into .venv (minutes, once)"
    # Newer torch is supported, too, but has no CPU build on every index, and then comes with gigabytes of CUDA.
    "$venv/bin/python" -m pip install "${quiet[@]}" -c constraints.txt -e '.[test,plot]' 'torch<2.14' >&2 || pip_failed
  fi
  stamp >"$venv/stamp.new" && mv "$venv/stamp.new" "$venv/stamp"
}

pip_failed() {
  fail "pip failed (above). Without a network: activate an environment with torch and Triton, or set PYROCSHMEM_NO_VENV=1"
}

if [ "${PYROCSHMEM_NO_VENV:-}" != 1 ] && in_plain_shell && is_current; then
  : # the usual case, decided without starting Python
elif use_active_environment; then
  venv=
elif ! is_current; then
  make_venv
fi
sh finegrained_alloc/build.sh >&2 || fail "could not build finegrained_alloc; it needs a C compiler (CC names another than cc)"
[ -z "$venv" ] || echo "$venv"
