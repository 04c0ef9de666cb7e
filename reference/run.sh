#!/usr/bin/env bash
# Runs torch.matmul and a torch.distributed collective on this machine: sets the environment up, then `python -m pyrocshmem reference`.
set -euo pipefail
unset CDPATH
here=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<'USAGE'
Usage: ./run.sh [OPTIONS]

Runs torch.matmul and a torch.distributed collective (NCCL, RCCL or gloo), checks the result and times it.

Options:
  -n, --num-gpus NUM      Number of GPUs to use, or of ranks on a CPU (default: 2)
  -c, --collective NAME   Collective operation to run, of those below (default: all_gather)
  --shape M,N,K           Global sizes of C = A x B (default: a Llama layer on GPUs, a small product on a CPU);
                          M,N where there is no product
  --dtype NAME            float16, bfloat16 or float32 (default: bfloat16, on a CPU float16)
  --backend NAME          auto, gpu or cpu (default: auto)
  --seed NUM              Seed of the random operands (default: 0)
  --iters NUM             Timed calls (default: 10)
  --json FILE             Write the results to FILE
  -h, --help              Show this help message and exit

Collectives, of C = A x B on R ranks:
  all_gather              A's rows are gathered, then multiplied by each rank's columns of B
  all_reduce              The sum over ranks of products over K/R, on every rank
  all_scatter             Each rank's columns of C, gathered on every rank
  reduce_scatter          The sum over ranks of products over K/R, each rank its own rows
  gemm_rms_norm           The same sum plus a residual, and its RMSNorm, on every rank
  gemm_rms_norm_all_scatter
                          Each rank's columns of C, their RMSNorm over all columns, gathered on every rank

Without a product:
  all_gather, all_reduce, all_scatter, reduce_scatter
                          With --shape M,N: of a tensor of M x N on each rank
  broadcast               M x N of rank 0, on every rank
  all_reduce_rms_norm     The RMSNorm of the sum over ranks of x [M, N], plus a residual, on every rank
  rms_norm                The RMSNorm of x + residual [M, N], whose columns are spread over ranks, each rank its own
  rms_norm_replicated     The same, all columns on every rank

Example:
  ./run.sh -n 4 -c all_reduce  # Run with 4 GPUs using all_reduce
USAGE
}

for arg in "$@"; do
  case $arg in
    -h | --help)
      usage
      exit 0
      ;;
  esac
done

# shellcheck source=/dev/null
source "$here/../activate.sh"
exec python -m pyrocshmem reference "$@"
