#!/bin/bash
# Frontier (OLCF): four MI250X a node, which are eight devices. From the root of the repository, for a grid of 32:
#
#     VENV=path/to/environment sbatch -A PROJECT --nodes=4 \
#         training_scripts/slurm/frontier.sh axonn.yaml training_scripts/finetune.py --model MODEL ...
#
# ROCM is the version of the module, the one that PyTorch was built for; OFI_PLUGIN the folder of RCCL's libfabric
# plug-in (aws-ofi-rccl).
#SBATCH --job-name=hf-axonn
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --partition=batch
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=56
#SBATCH --gpu-bind=none
#SBATCH --time=02:00:00
#SBATCH --no-requeue
set -euo pipefail

module load PrgEnv-gnu "rocm${ROCM:+/$ROCM}" craype-accel-amd-gfx90a
# shellcheck source=/dev/null
source "${VENV:?the Python environment that has hf_axonn: VENV=path sbatch ...}/bin/activate"

# RCCL needs the libfabric plug-in to use Slingshot; without it, it falls back to sockets.
if [[ -n ${OFI_PLUGIN:-} ]]; then
    export LD_LIBRARY_PATH=$OFI_PLUGIN/lib:${LD_LIBRARY_PATH:-}
else
    echo "OFI_PLUGIN is not set: RCCL will use sockets between nodes, which is slow." >&2
fi

export GPUS_PER_NODE=8
export OMP_NUM_THREADS=7
export NCCL_SOCKET_IFNAME=hsn0
export NCCL_NET_GDR_LEVEL=3
export NCCL_CROSS_NIC=1
export FI_CXI_ATS=0
export FI_MR_CACHE_MONITOR=disabled
# The script runs on node 0; its own address is the one on Slingshot.
HEAD_ADDRESS=$(hostname -i | cut -d ' ' -f 1)
export HEAD_ADDRESS

srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash "${NODE_SCRIPT:-$SLURM_SUBMIT_DIR/training_scripts/slurm/node.sh}" "$@"
