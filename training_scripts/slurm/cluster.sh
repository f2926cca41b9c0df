#!/bin/bash
# Any cluster with Slurm. From the root of the repository, with the number of nodes that the launch file needs:
#
#     VENV=path/to/environment GPUS_PER_NODE=8 sbatch -A PROJECT -p PARTITION --nodes=2 --gpus-per-node=8 \
#         training_scripts/slurm/cluster.sh axonn.yaml training_scripts/finetune.py --model MODEL ...
#
# NETWORK names the interface between nodes (ib0, hsn, eth0) where the libraries do not find the right one.
#SBATCH --job-name=hf-axonn
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --no-requeue
set -euo pipefail

# shellcheck source=/dev/null
source "${VENV:?the Python environment that has hf_axonn: VENV=path sbatch ...}/bin/activate"
if [[ -n ${NETWORK:-} ]]; then
    export NCCL_SOCKET_IFNAME=$NETWORK GLOO_SOCKET_IFNAME=$NETWORK
fi

srun --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash "${NODE_SCRIPT:-$SLURM_SUBMIT_DIR/training_scripts/slurm/node.sh}" "$@"
