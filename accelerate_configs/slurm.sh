#!/bin/bash
# A SLURM job on one machine or several: sbatch accelerate_configs/slurm.sh train_sft.py --config my_run.yaml
# One launcher for each machine, one process for each of its GPUs. Set the lines below as your cluster wants them.
# CONFIG=accelerate_configs/hsdp.yaml (or fsdp2.yaml) in the environment takes another config of Accelerate.
#SBATCH --job-name=plainloop
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
set -euo pipefail
cd "${SLURM_SUBMIT_DIR:-.}"
gpus=${SLURM_GPUS_ON_NODE:-1}                                          # processes of a machine
nodes=${SLURM_NNODES:-1}
first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)       # where process 0 is
port=$((20000 + SLURM_JOB_ID % 20000))                                  # two jobs on a machine take two ports
config=${CONFIG:-accelerate_configs/multi_node.yaml}
copies=""
if grep -q '^parallelism_config:' "$config"; then                        # HSDP: a copy of the model on each machine
    copies="--parallelism_config_dp_replicate_size $nodes --parallelism_config_dp_shard_size $gpus"
fi
export first port gpus nodes config copies

newest() { find "${OUTPUT_DIR:-/nowhere}" -maxdepth 1 -name 'checkpoint-*' 2> /dev/null | sort -V | tail -n 1 || true; }
before=$(newest)

# --max_hours stops in time for --time, with a checkpoint, counted from the start of each process.
# shellcheck disable=SC2016,SC2086  # expanded by the shell of each machine; copies are several words
srun --kill-on-bad-exit=1 bash -c '
    exec accelerate launch --config_file "$config" --num_machines "$nodes" --num_processes $((nodes * gpus)) $copies \
        --machine_rank "$SLURM_NODEID" --main_process_ip "$first" --main_process_port "$port" "$@"
' launcher "$@" && code=0 || code=$?

# A run that was stopped before its end has no summary.json yet: to the queue again, with the options of this job, if it has
# got on since the last time. RESUBMIT=1 OUTPUT_DIR=outputs/... asks for it.
if [ "${RESUBMIT:-0}" = 1 ] && [ -n "${OUTPUT_DIR:-}" ] && [ ! -e "$OUTPUT_DIR/summary.json" ]; then
    if [ -n "$(newest)" ] && [ "$(newest)" != "$before" ]; then
        scontrol requeue "$SLURM_JOB_ID"
    fi
fi
exit "$code"
