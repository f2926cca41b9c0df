#!/bin/bash
# Frontier (OLCF): four MI250X a node, which are eight devices. From the root of the repository, for a grid of 32:
#
#     VENV=path/to/environment sbatch -A PROJECT --nodes=4 \
#         training_scripts/slurm/frontier.sh axonn.yaml training_scripts/finetune.py --model MODEL ...
#
# ROCM is the version of the module, the one that PyTorch was built for.
#SBATCH --job-name=hf-axonn
#SBATCH --output=%x-%j.out
#SBATCH --open-mode=append
# The partition; 56 of 64 cores are allocatable, seven for each of eight devices:
# https://docs.olcf.ornl.gov/systems/frontier_user_guide.html
#SBATCH --partition=batch
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=56
# What the module rccl-net-plugin expects of the network:
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#alternative-rendezvous-protocol
#SBATCH --network=disable_rdzv_get
# Ours: one task a node, which has all devices and cores. OLCF starts a task for each device in place of a launcher,
# which Slurm binds to one core; --cpu-bind=none below lets it have all.
#SBATCH --gpu-bind=none
#SBATCH --time=02:00:00
#SBATCH --no-requeue
# Time to save in; a run that cannot be restarted goes on until the limit.
#SBATCH --signal=USR1@300
set -euo pipefail

# The last module has libfabric's plug-in for RCCL, which falls back to sockets without it, and the settings for it. It
# comes after rocm: https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#rccl-network-plugin
module load PrgEnv-gnu "rocm${ROCM:+/$ROCM}" craype-accel-amd-gfx90a rccl-net-plugin
# shellcheck source=/dev/null
source "${VENV:?the Python environment that has hf_axonn: VENV=path sbatch ...}/bin/activate"

export GPUS_PER_NODE=8
export OMP_NUM_THREADS=7
# The script runs on node 0. As in
# https://docs.olcf.ornl.gov/software/analytics/pytorch_frontier.html#master-address-and-sockets
HEAD_ADDRESS=$(hostname -i | cut -d ' ' -f 1)
export HEAD_ADDRESS

code=0
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash "${NODE_SCRIPT:-$SLURM_SUBMIT_DIR/training_scripts/slurm/node.sh}" "$@" || code=$?
# Exit code 75: a signal has come before the time limit, and the ranks have saved (docs/clusters.md).
if [[ $code == 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "saved, and not requeued: submit the same command again" >&2
fi
exit "$code"
