# What a job of SLURM does around train.py. Sourced by the files that `cluster=slurm` writes, and by the examples beside.
#
# - One node: train.py starts its own Ray with what the allocation has. Several: a Ray of this job alone over all of them.
# - SIGUSR1 (sbatch --signal=B:USR1@120) is passed on: train.py writes a checkpoint, and the job requeues itself.
#   It then resumes its very run, which train.py names in $run_file.
# - SIGTERM (scancel) is passed on too: a checkpoint if there is time, and no requeue.
#
# Set before:
overrides=("${overrides[@]}") # of train.py, without those of `cluster`
python=${python:-python}
num_cpus=${num_cpus:-}        # that Ray may use on a node; empty = what SLURM gave
num_gpus=${num_gpus:-}
object_store_memory=${object_store_memory-200000000} # bytes a node; empty = Ray's default
wait_s=${wait_s:-600}         # for the nodes to join, then for resources
again=("${again[@]}")         # overrides that a resume needs once more: storage.*
max_requeues=${max_requeues:-100}
go_on=${go_on:-}              # settings that take an interrupted run up again by hand
if [ -n "$SLURM_ARRAY_JOB_ID" ]; then id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; else id=$SLURM_JOB_ID; fi
run_file=${run_file:-$SLURM_SUBMIT_DIR/slurm}-$id.run

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
child= head= others= stopped=

pass_on() { # a signal, to what is waited for
    stopped=$1 signalled=1
    [ -z "$child" ] || kill -s "$1" "$child" 2>/dev/null
}
trap 'pass_on USR1' USR1
trap 'pass_on TERM' TERM

await() { # the exit code of the newest child; a trapped signal only interrupts `wait`
    child=$!
    [ -z "$stopped" ] || kill -s "$stopped" "$child" 2>/dev/null
    until signalled= && { wait "$child"; code=$?; } && [ -z "$signalled" ]; do :; done
    child=
    return "$code"
}

start_ray() { # over all nodes: sets `address`
    local file count=$((SLURM_JOB_NUM_NODES - 1))
    file=${RAY_TMPDIR:-/tmp}/manta-$SLURM_JOB_ID-$SLURMD_NODENAME/ray_current_cluster
    local node=(bash "$here/ray_node.sh" "$python" "$num_cpus" "$num_gpus" "$object_store_memory")
    "${node[@]}" --head --port=0 --include-dashboard=false &
    head=$!
    until [ -s "$file" ]; do
        kill -0 "$head" 2>/dev/null || { echo "slurm: Ray's head did not start on $SLURMD_NODENAME"; return 1; }
        [ -z "$stopped" ] || return 130
        sleep 0.2
    done
    address=$(cat "$file")
    srun --nodes="$count" --ntasks="$count" --ntasks-per-node=1 --exclude="$SLURMD_NODENAME" --cpu-bind=none \
        "${node[@]}" --address="$address" &
    others=$!
    "$python" -m manta.cluster.nodes "$address" "$SLURM_JOB_NUM_NODES" "$wait_s" "$others" &
    await
}

stop_ray() { # this one alone: `ray stop` would end those of other jobs on these nodes too
    [ -z "$others" ] || { kill -USR2 "$others" 2>/dev/null; wait "$others" 2>/dev/null; }
    [ -z "$head" ] || { kill -USR2 "$head" 2>/dev/null; wait "$head" 2>/dev/null; }
}

if [ -z "$RAY_AUTH_MODE" ]; then # one choice for all nodes: a token of this job
    RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export RAY_AUTH_MODE=token RAY_AUTH_TOKEN
fi
unset RAY_ADDRESS
export PYTHONUNBUFFERED=1 MANTA_RUN_FILE=$run_file

echo "slurm: job $id on $SLURM_JOB_NODELIST, requeued ${SLURM_RESTART_COUNT:-0} times, $(date)"
arguments=("${overrides[@]}")
[ ! -s "$run_file" ] || arguments=("resume='$(cat "$run_file")'" "${again[@]}")
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
    start_ray
    code=$?
    cluster=(cluster=existing "cluster.address=$address")
else
    code=0
    cluster=(cluster=local "cluster.num_cpus=${num_cpus:-$SLURM_CPUS_ON_NODE}"
        "cluster.num_gpus=${num_gpus:-${SLURM_GPUS_ON_NODE:-0}}" "cluster.object_store_memory=${object_store_memory:-null}")
fi
if [ "$code" = 0 ]; then
    "$python" "$here/../../train.py" "${arguments[@]}" "${cluster[@]}" "cluster.wait_s=$wait_s" &
    await
    code=$?
fi
stop_ray

case $stopped:$code in
*:0) ;;
USR1:130 | USR1:138 | USR1:143) # interrupted; the latter two: before it had begun
    if [ "${SLURM_RESTART_COUNT:-0}" -ge "$max_requeues" ]; then
        echo "slurm: not requeued: max_requeues=$max_requeues"
    elif scontrol requeue "$id"; then # of an array this task alone: the last one has the number of the whole
        echo "slurm: requeued"
        trap '' TERM # of the requeue
        code=0
    fi
    ;;
TERM:143) code=130 ;;
esac
if [ "$code" != 0 ] && [ -s "$run_file" ]; then
    echo "slurm: ended with $code. To go on: python train.py resume='$(cat "$run_file")' $go_on"
fi
exit "$code"
