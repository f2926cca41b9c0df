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
#SBATCH --exclusive
#SBATCH --time=02:00:00
#SBATCH --no-requeue
# Time to save in; a run that cannot be restarted goes on until the limit.
#SBATCH --signal=USR1@300
set -euo pipefail

# shellcheck source=/dev/null
source "${VENV:?the Python environment that has hf_axonn: VENV=path sbatch ...}/bin/activate"
if [[ -n ${NETWORK:-} ]]; then
    export NCCL_SOCKET_IFNAME=$NETWORK GLOO_SOCKET_IFNAME=$NETWORK
fi

code=0
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 \
    bash "${NODE_SCRIPT:-$SLURM_SUBMIT_DIR/training_scripts/slurm/node.sh}" "$@" || code=$?
# Exit code 75: a signal has come before the time limit, and the ranks have saved (docs/clusters.md).
if [[ $code == 75 ]]; then
    scontrol requeue "$SLURM_JOB_ID" || echo "saved, and not requeued: submit the same command again" >&2
fi
exit "$code"
