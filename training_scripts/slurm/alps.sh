#!/bin/bash
# Alps (CSCS): four GH200 a node. From the root of the repository, for a grid of 16:
#
#     VENV=path/to/environment sbatch -A PROJECT --nodes=4 \
#         training_scripts/slurm/alps.sh axonn.yaml training_scripts/finetune.py --model MODEL ...
#
# PyTorch comes from a container or a uenv: CONTAINER names an environment file of the container engine, or give sbatch
# --uenv=NAME --view=default. VENV is made inside of it, with access to its packages.
#SBATCH --job-name=hf-axonn
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=288
#SBATCH --time=02:00:00
#SBATCH --no-requeue
set -euo pipefail

: "${VENV:?the Python environment that has hf_axonn: VENV=path sbatch ...}"
export GPUS_PER_NODE=4
export OMP_NUM_THREADS=64
export NCCL_NET="AWS Libfabric"
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export FI_CXI_DISABLE_HOST_REGISTER=1
export FI_CXI_DEFAULT_CQ_SIZE=131072
export FI_MR_CACHE_MONITOR=userfaultfd
export MPICH_GPU_SUPPORT_ENABLED=0
# scontrol is not in a container, so the name of node 0 is found here, where the script runs.
HEAD_ADDRESS=$(hostname)
export HEAD_ADDRESS

# shellcheck disable=SC2016  # for the shell on each node, where the environment is
srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 ${CONTAINER:+--environment="$CONTAINER"} \
    bash -c 'source "$VENV/bin/activate" && exec bash "$0" "$@"' \
    "${NODE_SCRIPT:-$SLURM_SUBMIT_DIR/training_scripts/slurm/node.sh}" "$@"
