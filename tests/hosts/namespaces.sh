#!/usr/bin/env bash
# Hosts with a network and a /dev/shm of their own, of one machine: namespaces joined by a bridge.
#
#   unshare --map-root-user --net --mount --propagation private tests/hosts/namespaces.sh HOSTS RANKS FOLDER COMMAND...
#
# Runs COMMAND under torchrun, RANKS processes a host, and exits with 0 if all did. Once FOLDER/down exists, the last host
# is cut off for as many seconds as that file says.
set -euo pipefail
num_hosts=$1 ranks=$2 folder=$3
shift 3

mount -t tmpfs none /run
mkdir -p /run/netns
ip link set lo up
ip link add name bridge type bridge
ip link set bridge up
for ((host = 0; host < num_hosts; host++)); do
  ip netns add "host$host"
  ip link add name "port$host" type veth peer name "card$host" netns "host$host"
  ip link set "port$host" master bridge up
  ip -n "host$host" link set lo up
  ip -n "host$host" addr add "10.77.0.$((host + 1))/24" dev "card$host"
  ip -n "host$host" link set "card$host" up
done

agents=()
for ((host = 0; host < num_hosts; host++)); do
  ip netns exec "host$host" env "GLOO_SOCKET_IFNAME=card$host" \
    sh -c 'mount -t tmpfs tmpfs /dev/shm && exec "$@"' sh \
    python -m torch.distributed.run --nnodes "$num_hosts" --node-rank "$host" --nproc-per-node "$ranks" \
    --master-addr 10.77.0.1 --master-port 29500 "$@" &
  agents+=($!)
done
(
  while [ ! -e "$folder/down" ]; do sleep 0.05; done
  ip link set "port$((num_hosts - 1))" down
  sleep "$(cat "$folder/down")"
  ip link set "port$((num_hosts - 1))" up
) &
cutter=$!
status=0
for agent in "${agents[@]}"; do wait "$agent" || status=$?; done
kill "$cutter" 2>/dev/null || true
exit "$status"
