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
# A queue is a QOS, of which regular is the usual one: https://docs.nersc.gov/jobs/policy
#SBATCH --qos=regular
# A node has one EPYC 7763, 64 cores of two threads, and four A100: https://docs.nersc.gov/beginner-guide/nodetypesfig
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=128
# Not confirmed by NERSC's pages, but in many public job scripts: the constraint, and the one for 80 GB.
#SBATCH --constraint=gpu
# Ours: one task a node, which has all GPUs and cores.
#SBATCH --gpu-bind=none
#SBATCH --time=02:00:00
#SBATCH --no-requeue
# Time to save in; a run that cannot be restarted goes on until the limit.
#SBATCH --signal=USR1@300
set -euo pipefail

# libfabric's plug-in for NCCL, which falls back to sockets without it; PyTorch brings its own NCCL. The name of the
# module is not confirmed by NERSC's pages; public job scripts load it.
module load nccl
# shellcheck source=/dev/null
source "${VENV:?the Python environment that has hf_axonn: VENV=path sbatch ...}/bin/activate"

export GPUS_PER_NODE=4
export OMP_NUM_THREADS=16
# What NERSC's containers set with this plug-in:
# https://github.com/NERSC/podman-hpc/blob/main/etc/modules.d/nccl.yaml
# (it misspells the third: https://github.com/NERSC/podman-hpc/issues/136).
export NCCL_NET="AWS Libfabric"
export NCCL_SOCKET_IFNAME=hsn
export NCCL_NET_GDR_LEVEL=PHB
export NCCL_CROSS_NIC=1
export FI_CXI_DISABLE_HOST_REGISTER=1

code=0
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash "${NODE_SCRIPT:-$SLURM_SUBMIT_DIR/training_scripts/slurm/node.sh}" "$@" || code=$?
# Exit code 75: a signal has come before the time limit, and the ranks have saved (docs/clusters.md).
if [[ $code == 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "saved, and not requeued: submit the same command again" >&2
fi
exit "$code"
