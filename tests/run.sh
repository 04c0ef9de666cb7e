#!/usr/bin/env bash
# Runs every test that this machine can run, cheapest first, and says what it skipped and why.
#
#   tests/run.sh                              all of them
#   tests/run.sh --max-tier 1                 the cheap ones (a module's TIER is 0 cheapest .. 4 slowest)
#   PYROCSHMEM_BACKEND=gpu tests/run.sh --ranks-a-gpu 2   those that want more ranks than there are GPUs, two on each
#   tests/run.sh tests/stream_k -k schedule   arguments go to pytest; paths are relative to the repository
#
# One pytest process for each target (tests/conftest.py says why): the CPU target, compiling for GPUs that need not be
# here, and the GPU target where there is a GPU. PYROCSHMEM_BACKEND=cpu leaves the last out, =gpu insists on it.
# A pass that can't run here says why. The last line is `N passed, N failed, N skipped` over all of them. Exits 0 if nothing failed, 5 if no test was found.
set -uo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1

# shellcheck source=activate.sh
source ./activate.sh || exit 1
if ! python -c 'import importlib.util as u, sys; sys.exit(any(u.find_spec(m) is None for m in sys.argv[1:]))' \
  pytest pytest_timeout hypothesis; then
  echo "tests/run.sh: this environment lacks pytest, pytest-timeout or hypothesis; install the project's extra 'test'" >&2
  exit 1
fi

# Ranks share the cores: one thread each, or they starve one another.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1
# A pass that outlives this is hung in a way that the timeout of a single test could not end.
pass_limit_s=2400

tallies=$(mktemp -d)
trap 'rm -rf "$tallies"' EXIT
status=0 found=0 parts=0

workers=${PYROCSHMEM_TEST_WORKERS:-$(python -c 'import importlib.util as u, os
print(max(3, min(8, os.cpu_count() // 4)) if u.find_spec("xdist") else 1)')}

# run_apart NAME VARIABLE=VALUE... -- PYTEST_ARGUMENT...: a pass, in two parts where there are cores for several tests.
run_apart() {
  if [ "$workers" -lt 2 ]; then
    run_pass "$@"
  else
    run_pass "$@" --alone without -n "$workers"
    run_pass "$@" --alone only
  fi
}

# run_pass NAME VARIABLE=VALUE... -- PYTEST_ARGUMENT...
run_pass() {
  local name=$1 variables=() code tally
  tally=$tallies/$((++parts)).json
  shift
  while [ "$1" != -- ]; do
    variables+=("$1")
    shift
  done
  shift
  printf '\n=== pass: %s ===\n' "$name"
  env -u TRITON_INTERPRET -u PYROCSHMEM_BACKEND "${variables[@]}" \
    timeout --foreground --kill-after=20 "$pass_limit_s" \
    python -m pytest --pass "$name" --tally "$tally" "$@"
  code=$?
  [ "$code" = 5 ] || found=1
  case $code in
    0 | 5) ;;
    *)
      status=$code
      # A crash leaves no tally: it counts as one failure.
      [ -s "$tally" ] || echo '{"passed": 0, "failed": 1, "skipped": 0}' >"$tally"
      ;;
  esac
}

gpu_present() {
  compgen -G '/dev/nvidia[0-9]*' >/dev/null || [ -e /dev/kfd ] || [ -e /dev/dxg ] || return 1
  python -c 'import torch, sys; sys.exit(torch.cuda.device_count() == 0)'
}

backend=${PYROCSHMEM_BACKEND:-auto}
# Why this environment's Triton can't interpret, nothing if it can. Other errors are for the pass itself to show.
no_interpreter() {
  env -u TRITON_INTERPRET PYROCSHMEM_BACKEND=cpu python -c 'import pyrocshmem.target' 2>&1 |
    sed -n 's/^RuntimeError: \(the interpreter of Triton\)/\1/p'
}

if [ "$backend" != gpu ]; then
  reason=$(no_interpreter)
  if [ -z "$reason" ]; then
    run_apart cpu PYROCSHMEM_BACKEND=cpu -- "$@"
  else
    printf '\n=== pass: cpu, not run: %s ===\n' "$reason"
  fi
fi
[ "$backend" = gpu ] || run_pass compile TRITON_INTERPRET=0 -- "$@"
if [ "$backend" = gpu ] || { [ "$backend" != cpu ] && gpu_present; }; then
  run_apart gpu PYROCSHMEM_BACKEND=gpu -- "$@"
else
  printf '\n=== pass: gpu, not run: %s ===\n' "$([ "$backend" = cpu ] && echo PYROCSHMEM_BACKEND=cpu || echo 'no GPU here')"
fi

[ "$found" = 1 ] || status=5
echo
python - "$tallies" <<'PYTHON'
import json, sys
from pathlib import Path

counts = [json.loads(path.read_text()) for path in Path(sys.argv[1]).glob("*.json")]
print(", ".join(f"{sum(c[name] for c in counts)} {name}" for name in ("passed", "failed", "skipped")))
PYTHON
exit "$status"
