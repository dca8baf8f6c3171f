#!/usr/bin/env bash
# A run over three hosts without Slurm. They are network namespaces of this machine, so the script needs root; each has an
# address, a host name and a loopback of its own, and all see the same folders, as a cluster's hosts do.
#
#   examples/several_hosts.sh [STEPS]
#
# On real hosts the whole of it is one command on the first one, where `ssh` reaches the others without a password:
#
#   megatron-scalerl train RECIPE --hosts one,two,three --slots 8
#
# --slots is the number of GPUs of each host. Ranks fill the hosts in order, engines follow, and no engine spans two
# hosts: here two ranks (tensor parallel) on one and two, and the engine on three. --run-on is the command that runs its last
# argument in a shell on {host}; under Slurm, `--hosts slurm` does it with srun, and `megatron-scalerl submit --nodes 3`
# does everything.
set -euo pipefail
cd "$(dirname "$0")/.."
steps="${1:-4}"
python="$PWD/.venv/bin/python"
[ "$(id -u)" = 0 ] || { echo "several_hosts.sh: expected root, which makes network namespaces, found user $(id -un)" >&2; exit 2; }
for program in ip unshare; do
  command -v "$program" >/dev/null || { echo "several_hosts.sh: expected $program on the path, found none" >&2; exit 2; }
done

# names of this process's own, so that two of these scripts do not meet
id=$$
bridge="msrl$id"
subnet="10.$((id % 200 + 20)).$((id / 200 % 250))"
hosts=("one-$id" "two-$id" "three-$id")
clean_up() {
  for host in "${hosts[@]}"; do
    ip netns pids "$host" 2>/dev/null | xargs -r kill -9 2>/dev/null || true
    ip netns del "$host" 2>/dev/null || true
  done
  ip link del "$bridge" 2>/dev/null || true
}
trap clean_up EXIT
ip link add "$bridge" type bridge
ip link set "$bridge" up
for number in 0 1 2; do
  host="${hosts[$number]}"
  ip netns add "$host"
  ip link add "v$id$number" type veth peer name eth0 netns "$host"
  ip link set "v$id$number" master "$bridge" up
  ip -n "$host" link set lo up
  ip -n "$host" addr add "$subnet.$((number + 1))/24" dev eth0
  ip -n "$host" link set eth0 up
done

tiny=runs/tiny_hosts
[ -e "$tiny/tiny.json" ] || "$python" -m megatron_scalerl.tiny "$tiny" --seed 1 --train-prompts 200
[ -e "$tiny/policy/config.json" ] ||
  "$python" -m megatron_scalerl sft recipes/tiny_cpu.yaml "sft.path=$tiny/sft.jsonl" sft.steps=100 \
    "policy.path=$tiny/base_policy" --out "$tiny/policy"
ip netns exec "${hosts[0]}" unshare --uts sh -c 'hostname "$1"; shift; exec "$@"' - "${hosts[0]}" \
  "$python" -m megatron_scalerl train recipes/tiny_cpu.yaml \
  --hosts "$(IFS=,; echo "${hosts[*]}")" --slots 1 --address "$subnet.1" \
  --run-on 'ip netns exec {host} unshare --uts sh -c' \
  "name=several_hosts_$id" "steps=$steps" "prompts.path=$tiny/prompts.jsonl" "prompts.held_out_path=$tiny/held_out.jsonl" \
  "policy.path=$tiny/policy" trainer.world_size=2 megatron.parallel.tensor_model_parallel_size=2 \
  rollouts.groups_per_batch=4 validation.every_steps=0 checkpoint.every_steps=2
echo "logs of all hosts:" "runs/several_hosts_$id"/logs/*.log
