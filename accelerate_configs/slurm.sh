#!/bin/bash
# A SLURM job on one machine or several: sbatch accelerate_configs/slurm.sh train_sft.py --config my_run.yaml
# One launcher for each machine, one process for each of its GPUs. Set the lines below as your cluster wants them.
#SBATCH --job-name=plainloop
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
gpus=${SLURM_GPUS_ON_NODE:-1}                                          # processes of a machine
nodes=${SLURM_NNODES:-1}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)       # where process 0 is
port=$((20000 + SLURM_JOB_ID % 20000))                                  # two jobs on a machine take two ports
config=${CONFIG:-accelerate_configs/multi_node.yaml}
export first port gpus nodes config

# --max_hours stops in time for --time, with a checkpoint, counted from the start of each process.
srun --kill-on-bad-exit=1 bash -c '
    exec accelerate launch --config_file "$config" --num_machines "$nodes" --num_processes $((nodes * gpus)) \
        --machine_rank "$SLURM_NODEID" --main_process_ip "$first" --main_process_port "$port" "$@"
' launcher "$@" && code=0 || code=$?

# A run that was stopped before its end has no summary.json yet: to the queue again. RESUBMIT=1 asks for it.
if [ "${RESUBMIT:-0}" = 1 ] && [ "$code" != 0 ] && [ -n "${OUTPUT_DIR:-}" ] && [ ! -e "$OUTPUT_DIR/summary.json" ]; then
    ls "$OUTPUT_DIR"/checkpoint-* > /dev/null 2>&1 && sbatch "$0" "$@"
fi
exit "$code"
