#!/bin/bash
# Perlmutter (NERSC): four A100 a node. From the root of the repository, for a grid of 16:
#
#     VENV=path/to/environment sbatch -A PROJECT --nodes=4 \
#         training_scripts/slurm/perlmutter.sh axonn.yaml training_scripts/finetune.py --model MODEL ...
#
# For the A100 with 80 GB: --constraint='gpu&hbm80g'.
#SBATCH --job-name=hf-axonn
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --constraint=gpu
#SBATCH --qos=regular
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=128
#SBATCH --gpu-bind=none
#SBATCH --time=02:00:00
#SBATCH --no-requeue
set -euo pipefail

# NCCL needs the libfabric plug-in to use Slingshot; without it, it falls back to sockets.
module load nccl-plugin
# shellcheck source=/dev/null
source "${VENV:?the Python environment that has hf_axonn: VENV=path sbatch ...}/bin/activate"

export GPUS_PER_NODE=4
export OMP_NUM_THREADS=16
export NCCL_NET="AWS Libfabric"
export NCCL_SOCKET_IFNAME=hsn
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export FI_CXI_DISABLE_HOST_REGISTER=1

srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash "${NODE_SCRIPT:-$SLURM_SUBMIT_DIR/training_scripts/slurm/node.sh}" "$@"
