#!/bin/bash
# What every node of a job runs, once: accelerate's launcher with this node's number.
#
#     srun --ntasks-per-node=1 training_scripts/slurm/node.sh axonn.yaml script.py --its_own options
#
# With `none` in place of a launch file the script runs once, as one process on node 0. In place of a script, `-m` and
# the name of a module do as well. The scripts of the sites find this file by NODE_SCRIPT, by default in
# training_scripts/slurm of the folder that the job was submitted from.
#
# Read from the environment, beside Slurm's own variables:
#     GPUS_PER_NODE   processes of a node; checked against num_processes of the launch file (optional)
#     HEAD_ADDRESS    where the ranks meet: a name or address of node 0 (default: its name in Slurm)
#     HEAD_PORT       a port there (default: one that follows from the job's number)
set -euo pipefail
# SIGUSR1 comes before the time limit: who can save takes it, and nobody ends at it.
trap '' USR1

config=${1:?the launch file is missing: node.sh axonn.yaml script.py ...}
script=${2:?the training script is missing: node.sh axonn.yaml script.py ...}
shift 2

if [[ $config == none ]]; then
    [[ $SLURM_NODEID == 0 ]] || exit 0
    exec python "$script" "$@"
fi

size=()
if [[ -n ${GPUS_PER_NODE:-} ]]; then
    # The number of processes; auto where the grid has `data: auto`, for any number of nodes.
    processes=$(python -c 'import sys, yaml; file = yaml.safe_load(open(sys.argv[1])); grid = (file.get("axonn_config")
or {}).get("grid"); auto = isinstance(grid, dict) and grid.get("data") == "auto"
print("auto" if auto else file.get("num_processes"))' "$config")
    if [[ $processes == auto ]]; then
        size=(--num_processes $((SLURM_NNODES * GPUS_PER_NODE)))
    elif [[ $processes != $((SLURM_NNODES * GPUS_PER_NODE)) ]]; then
        echo "$config: num_processes is $processes, but $SLURM_NNODES nodes with $GPUS_PER_NODE GPUs each are" \
            "$((SLURM_NNODES * GPUS_PER_NODE)): change --nodes, or num_processes and the grid." >&2
        exit 2
    fi
fi

if [[ -z ${HEAD_ADDRESS:-} ]]; then
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    HEAD_ADDRESS=${hosts%%$'\n'*}
fi
# Jobs that share a node must not share a port.
port=${HEAD_PORT:-$((20000 + SLURM_JOB_ID % 10000))}

exec accelerate launch --config "$config" --num_machines "$SLURM_NNODES" --machine_rank "$SLURM_NODEID" \
    --main_process_ip "$HEAD_ADDRESS" --main_process_port "$port" --same_network "${size[@]}" "$script" "$@"
