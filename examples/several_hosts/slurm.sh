#!/usr/bin/env bash
# Tensor-parallel training over the hosts of a SLURM job: one torchrun a host, a process for each of its GPUs.
#
#   sbatch --nodes 2 --gpus-per-node 8 examples/several_hosts/slurm.sh
#   sbatch --nodes 4 --gpus-per-node 8 examples/several_hosts/slurm.sh examples/rms/torchrun.py --hidden 8192
#
# Without arguments it runs examples/training/tensor_parallel.py. Submit it from the repository's folder, in an
# environment in which the project is installed on every host.
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
set -euo pipefail

hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*} MASTER_PORT=${MASTER_PORT:-29500}
# What the ranks share, so that nobody else who reaches the store can write in their name.
PYROCSHMEM_SECRET=$(head -c 32 /dev/urandom | od -An -tx1 | tr -d ' \n')
export PYROCSHMEM_SECRET

# $SLURM_NODEID is each host's own.
# shellcheck disable=SC2016
srun --ntasks-per-node=1 bash -c '
  exec python -m torch.distributed.run --nnodes "$SLURM_JOB_NUM_NODES" --node-rank "$SLURM_NODEID" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"
' bash "${@:-examples/training/tensor_parallel.py}"
