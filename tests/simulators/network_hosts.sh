#!/bin/bash
# Two or more hosts on this machine: network namespaces that a bridge connects, for tests of jobs on several hosts. Each
# but the first, from which jobs are launched, also has a PID namespace, so that it ends its own orphans.
#   network_hosts.sh up NAME N                  creates hosts NAME0 to NAME<N-1>, with addresses 10.77.0.1 and up
#   network_hosts.sh rate NAME N RATE           limits what each host sends, for example 1gbit; at most 5 ms are queued
#   network_hosts.sh delay NAME N US TUN_DELAY  delays what each host sends by US microseconds; not twice
#   network_hosts.sh run NAMEi COMMAND...       runs a command on host NAMEi, with its host name
#   network_hosts.sh bytes NAMEi                prints the bytes that the host has sent and received
#   network_hosts.sh processes NAMEi            prints the processes on the host: pids on this machine, command lines
#   network_hosts.sh cut NAMEi                  cuts the host's link
#   network_hosts.sh lose NAMEi                 drops all packets to the host
#   network_hosts.sh restore NAMEi              ends `cut` and `lose`
#   network_hosts.sh kill NAMEi                 kills all processes on the host; not of NAME0
#   network_hosts.sh down NAME N                ends all processes on the hosts and removes them
# mpirun starts ranks through it: --mca plm_rsh_agent "network_hosts.sh run". Needs root.
set -euo pipefail
action=$1 name=$2
shift 2
# The processes of the host, and the first one of its PID namespace.
pids() { for pid in $(ip netns pids "$name"); do is_first "$pid" || is_relay "$pid" || echo "$pid"; done; }
first() { for pid in $(ip netns pids "$name"); do ! is_first "$pid" || echo "$pid"; done; }
is_relay() { [[ $(cat "/proc/$1/comm" 2> /dev/null) == tun_delay ]]; }
is_first() { grep -qs $'^NSpid:.*\t1$' "/proc/$1/status"; }
# The link of this host, or of the other one, is cut.
is_cut() { [[ $(cat /sys/class/net/eth0/carrier; ip netns exec "$name" cat /sys/class/net/eth0/carrier) == *0* ]]; }
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
      ip netns exec "$name$i" sh -c 'echo reno > /proc/sys/net/ipv4/tcp_congestion_control'
      ((i == 0)) && continue
      setsid unshare --uts --pid --fork --mount-proc ip netns exec "$name$i" \
        bash -c 'hostname "$0" && read -r <> <(:)' "$name$i" < /dev/null &> /dev/null &
      until [[ $("$0" run "$name$i" hostname 2> /dev/null) == "$name$i" ]]; do kill -0 $!; sleep 0.01; done
    done ;;
  rate)
    for ((i = 0; i < $1; ++i)); do
      ip netns exec "$name$i" tc qdisc replace dev eth0 root tbf rate "$2" burst 256k latency 5ms
    done ;;
  delay)
    for ((i = 0; i < $1; ++i)); do
      ip netns exec "$name$i" "$3" "$2" < /dev/null &> /dev/null &
      until ip -n "$name$i" route | grep -q '128.*delay'; do kill -0 $!; sleep 0.01; done
    done ;;
  run)
    first=$(first)
    [[ $first ]] || exec ip netns exec "$name" unshare --uts sh -c 'hostname "$0" && exec "$@"' "$name" sh -c "$*"
    code=0
    nsenter --target "$first" --net --uts --pid --mount --wd=. sh -c "$*" || code=$?
    while is_cut; do sleep 0.1; done  # as ssh, which would not notice the end
    exit "$code" ;;
  bytes)
    ip netns exec "$name" cat /sys/class/net/eth0/statistics/{tx,rx}_bytes ;;
  processes)
    pids | xargs -r ps --no-headers -o pid,args || true ;;
  cut)
    ip link set "$name" down ;;
  lose)
    tc qdisc replace dev "$name" root bfifo limit 1 ;;
  restore)
    tc qdisc delete dev "$name" root 2> /dev/null || true
    ip link set "$name" up ;;
  kill)
    kill -9 "$(first)" ;;
  down)
    for ((i = 0; i < $1; ++i)); do
      ip netns pids "$name$i" 2> /dev/null | xargs -r kill -9 2> /dev/null || true
      ip netns del "$name$i" 2> /dev/null || true
      ip link del "$name$i" 2> /dev/null || true  # the kernel keeps the namespace until its connections have ended
      rm -rf {"${TMPDIR:-/tmp}/ompi",/dev/shm/vader_segment}".$name$i."*  # of killed processes of OpenMPI
    done
    ip link del "$name" 2> /dev/null || true ;;
  *)
    echo "network_hosts.sh: unknown action $action" >&2
    exit 2 ;;
esac
