#!/bin/bash
# A Slurm cluster on this machine: its nodes are hosts of network_hosts.sh, on which this script starts Slurm's daemons
# and munge's without systemd, with 8 CPUs each. All files of the cluster are in the folder DIR. Needs root.
#   slurm_cluster.sh up DIR [N]              creates DIR and a cluster of N nodes (1), with addresses 10.77.0.1 and up
#   slurm_cluster.sh run DIR COMMAND...      runs a shell command on the first node, for example srun
#   slurm_cluster.sh name DIR                prints the name of the cluster: its nodes are the hosts NAME0, NAME1, ...
#   slurm_cluster.sh down DIR                ends all processes on the nodes and removes DIR, also after a failed `up`
set -euo pipefail
action=$1 dir=$2
shift 2
hosts=$(dirname "$0")/network_hosts.sh
on_node() {  # node, command
  "$hosts" run "$(cat "$dir/name")$1" "$0" on-this-node "$dir" "${2@Q}"
}
write_configuration() {  # name, nodes
  head -c 128 /dev/urandom > "$dir/munge.key"
  chmod 600 "$dir/munge.key"
  echo 127.0.0.1 localhost > "$dir/hosts"
  # ProctrackType, TaskPlugin and CgroupPlugin: no cgroups. config_overrides: more CPUs than the machine has.
  cat > "$dir/slurm.conf" << END
ClusterName=$1
SlurmctldHost=${1}0(10.77.0.1)
AuthType=auth/munge
AuthInfo=socket=$dir/munge.socket
CredType=cred/munge
SlurmUser=root
StateSaveLocation=$dir/state
SlurmctldPidFile=$dir/slurmctld.pid
SlurmctldLogFile=$dir/slurmctld.log
SlurmdSpoolDir=$dir/%n/spool
SlurmdPidFile=$dir/%n/slurmd.pid
SlurmdLogFile=$dir/%n/slurmd.log
TmpFS=$dir/%n/tmp
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
PartitionName=all Nodes=ALL Default=YES State=UP
END
  echo CgroupPlugin=cgroup/v1 > "$dir/cgroup.conf"
  mkdir "$dir/state"
  for ((i = 0; i < $2; ++i)); do
    mkdir -p "$dir/$1$i"/{spool,tmp}
    echo "10.77.0.$((i + 1)) $1$i" >> "$dir/hosts"
    echo "NodeName=$1$i NodeAddr=10.77.0.$((i + 1)) CPUs=8 State=UNKNOWN" >> "$dir/slurm.conf"
  done
}
case $action in
  up)
    nodes=${1:-1} name=sl$$x
    mkdir "$dir"
    trap '[[ $? == 0 ]] || { tail -n 20 "$dir"/*.log "$dir"/*/*.log || true; "$0" down "$dir"; } >&2' EXIT
    echo "$name" > "$dir/name"
    echo "$nodes" > "$dir/nodes"
    "$hosts" up "$name" "$nodes"
    write_configuration "$name" "$nodes"
    # --force: the folders above DIR may be closed to other users.
    on_node 0 "munged --force --key-file=$dir/munge.key --socket=$dir/munge.socket --pid-file=$dir/munged.pid \
      --seed-file=$dir/munged.seed --log-file=$dir/munged.log && slurmctld"
    for ((i = 0; i < nodes; ++i)); do on_node $i "slurmd -N $name$i"; done
    for ((i = 0; $(on_node 0 "sinfo --noheader --Node --states=idle" | wc -l) < nodes; ++i)); do
      ((i < 100)) || { echo "slurm_cluster.sh: not all nodes are idle after 20 s:" >&2; on_node 0 sinfo >&2; exit 1; }
      sleep 0.2
    done ;;
  run)
    on_node 0 "$*" ;;
  on-this-node)
    export SLURM_CONF=$dir/slurm.conf
    exec unshare --mount sh -c "mount --bind '$dir/hosts' /etc/hosts && $*" ;;
  name)
    cat "$dir/name" ;;
  down)
    [[ ! -e $dir/name ]] || "$hosts" down "$(cat "$dir/name")" "$(cat "$dir/nodes")"
    rm -rf "$dir" ;;
  *)
    echo "slurm_cluster.sh: unknown action $action" >&2
    exit 2 ;;
esac
