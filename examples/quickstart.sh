#!/usr/bin/env bash
# The main workflow at a small scale, on a machine without a GPU: installs everything, creates a tiny base policy, trains
# it with the ScaleRL recipe (Megatron-Core trainer, vLLM engine, weights broadcast while completions are being
# generated), and compares a forecast from the first half of the run with the second half.
#
#   examples/quickstart.sh [--seed N] [--gpu] [--smoke]
#
# PYTHON=PROGRAM takes an interpreter that has everything, and installs nothing.
# --gpu trains in bf16 on one GPU, on which trainer and engine take turns.
# --smoke runs every step at the smallest scale: a weak policy, six optimizer steps.
set -euo pipefail
cd "$(dirname "$0")/.."
seed=1
smoke=()
gpu=()
while [ $# -gt 0 ]; do
  case "$1" in
    --seed) seed="$2"; shift 2 ;;
    --smoke) smoke=(smoke); shift ;;
    --gpu) gpu=(policy.dtype=bfloat16 engine.colocate=true engine.vllm.gpu_memory_utilization=0.3 engine.vllm.enforce_eager=true); shift ;;
    -h|--help) sed -n '2,/^set /s/^# \{0,1\}//p' examples/quickstart.sh; exit ;;
    *) echo "quickstart.sh: expected --seed N, --gpu, --smoke or --help, found '$1'" >&2; exit 2 ;;
  esac
done
began=$SECONDS
say() { printf '\n[%4d s] %s\n' $((SECONDS - began)) "$*"; }

if [ -n "${gpu:-}" ] && ! nvidia-smi -L > /dev/null 2>&1; then
  echo "quickstart.sh: nvidia-smi finds no GPU here; leave out --gpu, and the quickstart runs on CPUs" >&2
  exit 2
fi
python="${PYTHON:-.venv/bin/python}"
if [ -z "${PYTHON:-}" ]; then
  say "installing"
  if [ -n "${gpu:-}" ]; then tools/install.sh gpu; else tools/install.sh cpu; fi
fi

tiny="runs/tiny_$seed${smoke:+_smoke}"
name="quickstart_$seed${smoke:+_smoke}"
set -- "name=$name" "seed=$seed" "prompts.path=$tiny/prompts.jsonl" "prompts.held_out_path=$tiny/held_out.jsonl" \
  "sft.path=$tiny/sft.jsonl" "${gpu[@]}"
if [ -n "${smoke:-}" ]; then
  set -- "$@" steps=6 sft.steps=60 rollouts.groups_per_batch=4 validation.every_steps=1 validation.prompts=40 \
    validation.generations=2 checkpoint.every_steps=3 forecast.fit_from_steps=0 optimizer.warmup_steps=1
fi

say "making the task and an untrained policy in $tiny"
$python -m megatron_scalerl.tiny "$tiny" --seed "$seed" --train-prompts 1000
say "warm start: supervised training by the same trainer"
[ -e "$tiny/policy/config.json" ] ||
  $python -m megatron_scalerl sft recipes/tiny_cpu.yaml "$@" "policy.path=$tiny/base_policy" --out "$tiny/policy"
say "reinforcement learning with the ScaleRL recipe"
$python -m megatron_scalerl train recipes/tiny_cpu.yaml "$@" "policy.path=$tiny/policy"
say "result: gain, cost, and the forecast against the measurement"
$python -m megatron_scalerl report "runs/$name"
say "a completion whose thinking was cut: forced tokens stand in ⟦⟧, ‹v7› is the version of the weights"
$python -m megatron_scalerl show "runs/$name" --interrupted
say "done"
