# One node of the Ray of a job: bash ray_node.sh PYTHON CPUS GPUS OBJECT_STORE_MEMORY ROLE... (empty: what SLURM gave, or
# Ray's default). Stays until SIGUSR2, which ends Ray here and removes its folder.
python=$1 cpus=${2:-$SLURM_CPUS_ON_NODE} gpus=${3:-${SLURM_GPUS_ON_NODE:-0}} memory=${4:+--object-store-memory=$4}
shift 4
folder=${RAY_TMPDIR:-/tmp}/manta-$SLURM_JOB_ID-$SLURMD_NODENAME # short: sockets are in it
rm -rf "$folder"
mkdir -m 700 "$folder" || exit
# Without SIGTERM: scancel sends it to every process of the job, and with Ray gone at once nothing could be saved.
blocked='import os, signal, sys; signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]); os.execv(sys.executable, sys.argv[1:])'
"$python" -c "$blocked" "$python" -m ray.scripts.scripts start "$@" --num-cpus="$cpus" --num-gpus="$gpus" $memory --temp-dir="$folder" \
    --disable-usage-stats --block >"$folder/start.log" 2>&1 &
ray=$!
trap 'ended=1; kill -KILL "$ray" 2>/dev/null' USR2 # all that it has started dies with it
trap : TERM
until { wait "$ray"; code=$?; } 2>/dev/null && ! kill -0 "$ray" 2>/dev/null; do :; done
[ -z "$ended" ] || code=0
[ "$code" = 0 ] || { echo "slurm: Ray on $SLURMD_NODENAME ended with $code:"; tail -n 30 "$folder/start.log"; }
rm -rf "$folder"
exit "$code"
