#!/bin/bash
# A chain of restarts, for centres that allow no requeue: each job starts where the one before it was interrupted.
#
#   slurm/chain.sh 5 runs/mine slurm/homogeneous.sbatch my.toml [options of hpctrain train]
#
# Exit code 0 ends the chain: Slurm removes the jobs after it. After a mistake in the job file remove them yourself.
set -euo pipefail
length=${1:?usage: slurm/chain.sh LENGTH RUN_FOLDER SCRIPT JOB.toml [options of hpctrain train]}
export HPCTRAIN_CHAIN=1 HPCTRAIN_RUN=${2:?usage: slurm/chain.sh LENGTH RUN_FOLDER SCRIPT JOB.toml [options of hpctrain train]}
shift 2
mkdir -p "$HPCTRAIN_RUN"
id=$(sbatch --parsable --no-requeue "$@")
echo "$id"
for ((i = 1; i < length; i++)); do
    id=$(sbatch --parsable --no-requeue --dependency="afternotok:${id%%;*}" --kill-on-invalid-dep=yes "$@")
    echo "$id"
done
