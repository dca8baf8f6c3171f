#!/usr/bin/env bash
# A fixed policy behind a URL at a small scale, after examples/quickstart.sh: the policy from which the quickstart began
# learns from the one with which it ended. With --kl it is trained by rewards, with adapters and a price for leaving it.
#
#   [TEACHER=FOLDER] examples/distill.sh [--kl] [SEED] [key=value ...]
#
# The script starts the vLLM server of the fixed policy, on 127.0.0.1, and stops it however it ends. With the policy
# itself as TEACHER (runs/tiny_1/policy) loss/teacher_gap_max of step 1 is the difference of trainer and server.
set -euo pipefail
cd "$(dirname "$0")/.."
what=distill
case "${1:-}" in
  --kl) what=kl; shift ;;
esac
seed="${1:-1}"
shift || true
export PYTHONPATH=examples
python="${PYTHON:-.venv/bin/python}"
tiny="runs/tiny_$seed"
policy="$tiny/policy"
set -- "name=${what}_$seed" "seed=$seed" "policy.path=$policy" "prompts.path=$tiny/prompts.jsonl" steps=20 \
  "prompts.held_out_path=$tiny/held_out.jsonl" "sft.path=$tiny/sft.jsonl" rollouts.max_staleness_steps=1 "$@"
case "$what" in
  distill)
    teacher="${TEACHER:-$tiny/trained}"
    set -- algorithm.name=distill:Distill optimizer.lr=3e-4 optimizer.warmup_steps=2 "$@"
    [ -e "$teacher/config.json" ] || $python -m megatron_scalerl export "runs/quickstart_$seed" --out "$teacher" ;;
  kl)
    teacher="$policy"
    set -- algorithm.name=kl_to_base:KLToBase algorithm.coefficient=0.3 policy.lora={} weights.adapters=merged \
      optimizer.lr=1e-3 "$@" ;;
esac

port=$($python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
log="$tiny/${what}_server.log"
variables=(OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1 VLLM_NO_USAGE_STATS=1
  VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1)
env "${variables[@]}" $python -m vllm.entrypoints.openai.api_server --model "$teacher" --host 127.0.0.1 \
  --port "$port" --dtype float32 --enforce-eager --no-enable-chunked-prefill --kv-cache-memory-bytes 67108864 \
  --uvicorn-log-level warning > "$log" 2>&1 &
server=$!
trap 'kill "$server"; wait "$server" || true' EXIT
echo "waiting for the server of $teacher; its log is $log"
until $python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$port/health')" 2> /dev/null; do
  kill -0 "$server" || { tail "$log"; exit 1; }
  sleep 1
done

$python -m megatron_scalerl train recipes/tiny_cpu.yaml "algorithm.url=http://127.0.0.1:$port" "$@"
$python -m megatron_scalerl report "runs/${what}_$seed"
