#!/bin/bash
# One step of a study inside of a job. Batch scripts that `hf-axonn study RECIPE --slurm SITE` writes call it:
#
#     task.sh SITE RECIPE OUTPUT STEP
#
# SITE names the script in the folder slurm that sets up this cluster's environment and starts processes. A step that
# is done costs seconds; one whose earlier steps are not done says which, and ends with code 1.
set -euo pipefail

site=${1:?which cluster: task.sh SITE RECIPE OUTPUT STEP}
recipe=${2:?which recipe: task.sh SITE RECIPE OUTPUT STEP}
output=${3:?which directory: task.sh SITE RECIPE OUTPUT STEP}
step=${4:?which step: task.sh SITE RECIPE OUTPUT STEP}

scripts=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
export NODE_SCRIPT=$scripts/slurm/node.sh
start() { bash "$scripts/slurm/$site.sh" "$@"; }
study=(start none "$scripts/study/study.py" "$recipe" --output "$output" --step "$step")

words=$output/slurm/$step.words
if [[ ! -e $words ]]; then # a step of one process
    "${study[@]}"
    exit
fi
"${study[@]}" --begin
if [[ -e $output/.stamps/$step.json ]]; then
    exit 0
fi
mapfile -t launch < "$words"
code=0
start "${launch[@]}" 2>&1 | tee -a "$output/logs/$step.log" || code=$?
if ((code)); then
    echo "$step ended with code $code; its output is in $output/logs/$step.log" >&2
    "${study[@]}" --failed "$code" || true
    exit "$code"
fi
"${study[@]}" --end
