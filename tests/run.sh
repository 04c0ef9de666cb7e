#!/usr/bin/env bash
# Runs every test that this machine can run, cheapest first, and says what it skipped and why.
#
#   tests/run.sh                              all of them
#   tests/run.sh --max-tier 1                 the cheap ones (a module's TIER is 0 cheapest .. 4 slowest)
#   PYROCSHMEM_BACKEND=gpu tests/run.sh --ranks-a-gpu 2   those that want more ranks than there are GPUs, two on each
#   tests/run.sh tests/stream_k -k schedule   arguments go to pytest; paths are relative to the repository
#
# One pytest process for each target (tests/conftest.py says why): the CPU target, compiling for GPUs that need not be
# here (beside the one before), and the GPU target where there is a GPU. PYROCSHMEM_BACKEND=cpu leaves the last out, =gpu insists on it.
# A pass that can't run here says why. The last line is `N passed, N failed, N skipped` over all of them. Exits 0 if nothing failed, 5 if no test was found.
set -uo pipefail
unset CDPATH
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." || exit 1

for arg in "$@"; do
  case $arg in
    -h | --help)
      sed -n '2,/^set/ s/^# \{0,1\}//p' tests/run.sh # the words above
      exit 0
      ;;
  esac
done

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
pass_limit_s=3600
# Of a test that waits for what is compiled: at a tenth of two cores, what takes 10 s alone has taken more than 400.
compiled_limit_s=1500

tallies=$(mktemp -d)
beside=
# However it ends: what compiles ends with it, and has said what it found.
trap '[ -z "$beside" ] || { kill -- "-$beside" 2>/dev/null; cat "$tallies/compile.log"; }; rm -rf "$tallies"' EXIT
trap 'exit 130' INT
status=0 found=0 parts=0

workers=${PYROCSHMEM_TEST_WORKERS:-$(python -c 'import importlib.util as u, os
print(max(3, min(8, os.cpu_count() // 4)) if u.find_spec("xdist") else 1)')}
case $workers in
  '' | *[!0-9]*)
    echo "tests/run.sh: PYROCSHMEM_TEST_WORKERS is '$workers', a number is needed" >&2
    exit 2
    ;;
esac

# run_pass NAME VARIABLE=VALUE... -- PYTEST_ARGUMENT...
run_pass() {
  start_pass $((++parts)) "$@"
  end_pass $? "$parts"
}

# start_pass PART NAME VARIABLE=VALUE... -- PYTEST_ARGUMENT...: its exit status is pytest's.
start_pass() {
  local tally=$tallies/$1.json name=$2 variables=()
  shift 2
  while [ "$1" != -- ]; do
    variables+=("$1")
    shift
  done
  shift
  printf '\n=== pass: %s ===\n' "$name"
  env -u TRITON_INTERPRET -u PYROCSHMEM_BACKEND "${variables[@]}" \
    timeout --foreground --kill-after=20 "$pass_limit_s" \
    python -m pytest --pass "$name" --tally "$tally" "$@"
}

# end_pass EXIT_STATUS PART
end_pass() {
  local code=$1 tally=$tallies/$2.json
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

# Where there are cores for several tests, a pass has two parts: those that run at once, and those that others disturb.
apart=()
[ "$workers" -lt 2 ] || apart=(--alone without -n "$workers" --dist loadgroup --no-loadscope-reorder)

if [ "$backend" != gpu ]; then
  # Compiling takes the cores that tests leave it while they wait, and a tenth of them while they don't.
  compiling=$((++parts))
  set -m # a process group of its own, to end it as a whole
  {
    renice -n 10 -p "$BASHPID" >/dev/null
    start_pass "$compiling" compile TRITON_INTERPRET=0 -- --timeout "$compiled_limit_s" "$@"
  } >"$tallies/compile.log" 2>&1 &
  beside=$!
  set +m
  reason=$(no_interpreter)
  if [ -z "$reason" ]; then
    run_pass cpu PYROCSHMEM_BACKEND=cpu -- "$@" "${apart[@]}"
    [ "$workers" -lt 2 ] || run_pass cpu PYROCSHMEM_BACKEND=cpu -- "$@" --alone only
  else
    printf '\n=== pass: cpu, not run: %s ===\n' "$reason"
  fi
  # Nothing is left to disturb. Beside other busy processes it would take hours; only root may.
  renice -n 0 -g "$beside" >/dev/null 2>&1
  wait "$beside"
  code=$? beside=
  cat "$tallies/compile.log"
  end_pass "$code" "$compiling"
fi
if [ "$backend" = gpu ] || { [ "$backend" != cpu ] && gpu_present; }; then
  run_pass gpu PYROCSHMEM_BACKEND=gpu -- "$@" "${apart[@]}"
  [ "$workers" -lt 2 ] || run_pass gpu PYROCSHMEM_BACKEND=gpu -- "$@" --alone only
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
