#!/bin/bash
# Two or more hosts on this machine: network namespaces that a bridge connects, for tests of jobs on several hosts.
#   network_hosts.sh up NAME N                  creates hosts NAME0 to NAME<N-1>, with addresses 10.77.0.1 and up
#   network_hosts.sh rate NAME N RATE           limits what each host sends, for example 1gbit; at most 5 ms are queued
#   network_hosts.sh run NAMEi COMMAND...       runs a command on host NAMEi, with its host name
#   network_hosts.sh bytes NAMEi                prints the bytes that the host has sent and received
#   network_hosts.sh down NAME N                ends all processes on the hosts and removes them
# mpirun starts ranks through it: --mca plm_rsh_agent "network_hosts.sh run". Needs root.
set -euo pipefail
action=$1 name=$2
shift 2
case $action in
  up)
    ip link add "$name" type bridge
    ip link set "$name" up
    for ((i = 0; i < $1; ++i)); do
      ip netns add "$name$i"
      ip link add "$name$i" type veth peer name eth0 netns "$name$i"
      ip link set "$name$i" master "$name" up
      ip -n "$name$i" addr add "10.77.0.$((i + 1))/24" dev eth0
      ip -n "$name$i" link set eth0 up
      ip -n "$name$i" link set lo up
    done ;;
  rate)
    for ((i = 0; i < $1; ++i)); do
      ip netns exec "$name$i" tc qdisc replace dev eth0 root tbf rate "$2" burst 256k latency 5ms
    done ;;
  run)
    exec ip netns exec "$name" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$name" sh -c "$*" ;;
  bytes)
    ip netns exec "$name" cat /sys/class/net/eth0/statistics/{tx,rx}_bytes ;;
  down)
    for ((i = 0; i < $1; ++i)); do
      ip netns pids "$name$i" 2> /dev/null | xargs -r kill -9 2> /dev/null || true
      ip netns del "$name$i" 2> /dev/null || true
    done
    ip link del "$name" 2> /dev/null || true ;;
  *)
    echo "network_hosts.sh: unknown action $action" >&2
    exit 2 ;;
esac
