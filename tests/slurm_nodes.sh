#!/bin/bash
# A SLURM of its own on this machine, used by tests/slurm.py: `slurm_nodes.sh FOLDER NODES [SLURM.CONF LINES]` stays in the
# foreground, and all of it ends with it. Needs root, slurm-wlm, munge and iproute2.
#
# A network, pid, mount, uts and ipc namespace holds the controller (its first process is what `login` enters); one more each
# a node, with its own address, hostname, /tmp/ray and /dev/shm. A bridge connects them, so this machine's network is left alone.
set -u
NEW=(unshare --pid --fork --kill-child=KILL --mount --net --ipc --uts --mount-proc --propagation private)
self=$(realpath "$0")

reap() { # as the first process of a namespace must
    trap 'exit 0' TERM INT
    while :; do sleep 3600 & wait $!; done
}

configure() { # FOLDER NODES LINES
    mkdir -p "$1"/{home,etc,run,state,spool,log,munge,work}
    chmod 755 "$1" "$1/munge"
    { echo "127.0.0.1 localhost"; echo "10.77.0.254 login"; for i in $(seq "$2"); do echo "10.77.0.$i n$i"; done; } >"$1/etc/hosts"
    cat >"$1/etc/slurm.conf" <<END
ClusterName=lab
# Ray's folders have the number in their names, and are in the one /tmp.
FirstJobId=$((1000 + RANDOM * 10))
SlurmctldHost=login(10.77.0.254)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# A job that was requeued waits for this many seconds and one more.
AuthInfo=socket=$1/munge/munge.socket,cred_expire=5
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool/%n
SlurmctldPidFile=$1/run/slurmctld.pid
SlurmdPidFile=$1/run/slurmd.%n.pid
SlurmctldLogFile=$1/log/slurmctld.log
SlurmdLogFile=$1/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=2
KillWait=30
SlurmdParameters=config_overrides
GresTypes=gpu
NodeName=n[1-$2] NodeAddr=10.77.0.[1-$2] CPUs=4 RealMemory=8000 Gres=gpu:2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
$3
END
    echo "NodeName=n[1-$2] Name=gpu File=/dev/tty[0-1]" >"$1/etc/gres.conf"
    echo CgroupPlugin=cgroup/v1 >"$1/etc/cgroup.conf" # the one plug-in that starts without systemd
}

case $1 in
controller) # FOLDER NODES
    export SLURM_CONF=$2/etc/slurm.conf
    munge=$2/munge
    hostname login
    ip link set lo up
    mount --bind "$2/etc/hosts" /etc/hosts
    ip link add br0 type bridge
    ip addr add 10.77.0.254/24 dev br0
    ip link set br0 up
    mungekey --create --keyfile="$munge/munge.key"
    chmod 400 "$munge/munge.key"
    munged --key-file="$munge/munge.key" --socket="$munge/munge.socket" --pid-file="$munge/munged.pid" \
        --log-file="$munge/munged.log" --seed-file="$munge/munge.seed"
    slurmctld -c
    for i in $(seq "$3"); do
        "${NEW[@]}" bash "$self" node "$2" "$i" </dev/null >>"$2/log/init.n$i.log" 2>&1 &
        unshare=$! child=
        until [ -n "$child" ] && [ "$(readlink "/proc/$child/ns/net")" != "$(readlink /proc/self/ns/net)" ]; do
            child=$(pgrep -P "$unshare")
            sleep 0.02
        done
        ip link add "v$i" type veth peer name eth0 netns "$child"
        ip link set "v$i" master br0 up
    done
    reap
    ;;
node) # FOLDER NUMBER
    export SLURM_CONF=$2/etc/slurm.conf
    hostname "n$3"
    ip link set lo up
    until ip link show eth0 >/dev/null 2>&1; do sleep 0.02; done
    ip addr add "10.77.0.$3/24" dev eth0
    ip link set eth0 up
    mkdir -p /tmp/ray "$2/ray.n$3" "$2/spool/n$3"
    mount --bind "$2/ray.n$3" /tmp/ray
    mount -t tmpfs -o size=2g tmpfs /dev/shm
    slurmd -c
    reap
    ;;
*)
    configure "$1" "$2" "${3:-}"
    exec "${NEW[@]}" bash "$self" controller "$1" "$2"
    ;;
esac
