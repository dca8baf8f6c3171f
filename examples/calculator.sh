#!/usr/bin/env bash
# Episodes of several turns at a small scale, after examples/quickstart.sh: the tiny policy learns to ask a calculator.
#
#   examples/calculator.sh [SEED] [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
seed="${1:-1}"
shift || true
export PYTHONPATH=examples
python="${PYTHON:-.venv/bin/python}"
tiny="runs/tiny_$seed"
policy="$tiny/calculator_policy"
set -- overlay=examples/calculator.yaml "name=calculator_$seed" "seed=$seed" "prompts.path=$tiny/prompts.jsonl" \
  "prompts.held_out_path=$tiny/held_out.jsonl" "sft.path=$tiny/calculator_sft.jsonl" "$@"

$python -m megatron_scalerl.tiny "$tiny" --seed "$seed" --train-prompts 1000
$python examples/calculator.py < "$tiny/sft.jsonl" > "$tiny/calculator_sft.jsonl"
[ -e "$policy/config.json" ] ||
  $python -m megatron_scalerl sft recipes/tiny_cpu.yaml "$@" "policy.path=$tiny/base_policy" --out "$policy"
$python -m megatron_scalerl train recipes/tiny_cpu.yaml "$@" "policy.path=$policy"
$python -m megatron_scalerl report "runs/calculator_$seed"
$python -m megatron_scalerl show "runs/calculator_$seed"
