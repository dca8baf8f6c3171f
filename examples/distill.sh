#!/usr/bin/env bash
# A fixed policy behind a URL at a small scale, after examples/quickstart.sh: a student that was hardly warm-started
# learns from the quickstart's policy. With --kl that policy itself is trained, with adapters and a penalty for leaving it.
#
#   [TEACHER=FOLDER] examples/distill.sh [--kl] [SEED] [key=value ...]
#
# The script starts the vLLM server of the fixed policy, on 127.0.0.1, and stops it however it ends. With the student
# itself as TEACHER the first step's loss/teacher_gap_max says how far trainer and server differ on the same tokens.
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
teacher="${TEACHER:-$tiny/policy}"
name="${what}_$seed"
set -- "seed=$seed" "prompts.path=$tiny/prompts.jsonl" "prompts.held_out_path=$tiny/held_out.jsonl" \
  "sft.path=$tiny/sft.jsonl" steps=20 "$@"

warm_start() {  # FOLDER [key=value ...]
  [ -e "$1/config.json" ] ||
    $python -m megatron_scalerl sft recipes/tiny_cpu.yaml "policy.path=$tiny/base_policy" "${@:2}" --out "$1"
}
[ -e "$tiny/base_policy" ] || $python -m megatron_scalerl.tiny "$tiny" --seed "$seed" --train-prompts 1000
warm_start "$teacher" "$@"
case "$what" in
  distill)
    warm_start "$tiny/student" "$@" sft.steps=150
    set -- "policy.path=$tiny/student" optimizer.lr=5e-4 optimizer.warmup_steps=2 algorithm.name=distill:Distill "$@" ;;
  kl)
    set -- "policy.path=$teacher" policy.lora={} weights.adapters=merged optimizer.lr=1e-3 \
      algorithm.name=kl_to_base:KLToBase "$@" ;;
esac

port=$($python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
variables=(OMP_NUM_THREADS=1 VLLM_CPU_OMP_THREADS_BIND=nobind TORCHDYNAMO_DISABLE=1 VLLM_NO_USAGE_STATS=1
  VLLM_ENABLE_V1_MULTIPROCESSING=0 VLLM_HOST_IP=127.0.0.1 GLOO_SOCKET_IFNAME=lo HF_HUB_OFFLINE=1)
env "${variables[@]}" $python -m vllm.entrypoints.openai.api_server --model "$teacher" --host 127.0.0.1 \
  --port "$port" --dtype float32 --enforce-eager --no-enable-chunked-prefill --kv-cache-memory-bytes 67108864 \
  --uvicorn-log-level warning > "$tiny/${what}_server.log" 2>&1 &
server=$!
trap 'kill "$server"; wait "$server" || true' EXIT
echo "waiting for the server of $teacher; its log is $tiny/${what}_server.log"
until $python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:$port/health')" 2> /dev/null; do
  kill -0 "$server" || { tail "$tiny/${what}_server.log"; exit 1; }
  sleep 1
done

$python -m megatron_scalerl train recipes/tiny_cpu.yaml "name=$name" "algorithm.url=http://127.0.0.1:$port" "$@"
$python -m megatron_scalerl report "runs/$name"
