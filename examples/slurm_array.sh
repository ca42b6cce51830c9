#!/bin/bash
# Five seeds as a job array of Slurm. A job that runs out of its time saves its run, and is queued again to go on.
#
#   mkdir -p logs && sbatch examples/slurm_array.sh CartPole-v1 --total-steps 100M --num-envs 32
#
#SBATCH --job-name=muster
#SBATCH --array=1-5
#SBATCH --cpus-per-task=8
#SBATCH --time=04:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=logs/%A_%a.txt

seed=$SLURM_ARRAY_TASK_ID
# The same line each time: it begins the run, or goes on with it. In the background, so that bash receives signals.
muster train "$@" --seed "$seed" --run-dir "runs/array/seed$seed" --resume-or-begin &
training=$!

# SIGUSR1 comes two minutes before the end, to this script alone (B:). By SIGTERM the run is saved, and ends.
out_of_time=0
trap 'out_of_time=1; kill -TERM "$training"' USR1
trap 'kill -TERM "$training"' TERM

while kill -0 "$training" 2>/dev/null; do # a signal ends the wait, and not the training
  wait "$training"
done
wait "$training" # bash remembers its status
status=$?

if [ "$out_of_time" -eq 1 ] && [ "$status" -eq 143 ]; then # stopped by SIGTERM, and saved
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
