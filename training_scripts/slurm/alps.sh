#!/bin/bash
# Alps (CSCS): four GH200 a node. From the root of the repository, for a grid of 16:
#
#     VENV=path/to/environment sbatch -A PROJECT --nodes=4 \
#         training_scripts/slurm/alps.sh axonn.yaml training_scripts/finetune.py --model MODEL ...
#
# PyTorch comes from a container or a uenv: CONTAINER names an environment file of the container engine, or give sbatch
# --uenv=NAME --view=default. VENV is made inside of it, with access to its packages:
# https://docs.cscs.ch/software/ml/pytorch
#SBATCH --job-name=hf-axonn
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
# A node has four GH200, each with 72 cores: https://docs.cscs.ch/running/slurm
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=288
#SBATCH --time=02:00:00
#SBATCH --no-requeue
# Time to save in; a run that cannot be restarted goes on until the limit.
#SBATCH --signal=USR1@300
set -euo pipefail

: "${VENV:?the Python environment that has hf_axonn: VENV=path sbatch ...}"
export GPUS_PER_NODE=4
# Of 72 cores some belong to the system: https://docs.cscs.ch/software/sciapps/gromacs
export OMP_NUM_THREADS=64
# The container engine's hook aws_ofi_nccl sets these as well, a uenv does not:
# https://docs.cscs.ch/software/communication/nccl
export NCCL_NET="AWS Libfabric"
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export NCCL_PROTO=^LL128
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_CXI_DEFAULT_TX_SIZE=16384
export FI_CXI_RX_MATCH_MODE=software
export FI_MR_CACHE_MONITOR=userfaultfd
# GPU-aware MPI beside NCCL can deadlock: https://docs.cscs.ch/software/ml/pytorch
export MPICH_GPU_SUPPORT_ENABLED=0
# A container has no scontrol unless it is mounted (the same page), so node 0 is found here, where the script runs.
HEAD_ADDRESS=$(hostname)
export HEAD_ADDRESS

code=0
# shellcheck disable=SC2016  # for the shell on each node, where the environment is
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    ${CONTAINER:+--environment="$CONTAINER"} \
    bash -c 'source "$VENV/bin/activate" && exec bash "$0" "$@"' \
    "${NODE_SCRIPT:-$SLURM_SUBMIT_DIR/training_scripts/slurm/node.sh}" "$@" || code=$?
# Exit code 75: a signal has come before the time limit, and the ranks have saved (docs/clusters.md).
if [[ $code == 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "saved, and not requeued: submit the same command again" >&2
fi
exit "$code"
