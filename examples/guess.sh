#!/usr/bin/env bash
# An environment with a hidden state at a small scale, after examples/quickstart.sh: the tiny policy learns to guess a
# number from hints.
#
#   examples/guess.sh [SEED] [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
seed="${1:-1}"
shift || true
export PYTHONPATH=examples
python="${PYTHON:-.venv/bin/python}"
tiny="runs/tiny_$seed"
policy="$tiny/guess_policy"
set -- overlay=examples/guess.yaml "name=guess_$seed" "seed=$seed" "prompts.path=$tiny/prompts.jsonl" \
  "prompts.held_out_path=$tiny/held_out.jsonl" "sft.path=$tiny/guess_sft.jsonl" steps=40 "$@"

$python -m megatron_scalerl.tiny "$tiny" --seed "$seed" --train-prompts 1000
$python examples/guess.py > "$tiny/guess_sft.jsonl"
[ -e "$policy/config.json" ] ||
  $python -m megatron_scalerl sft recipes/tiny_cpu.yaml "$@" "policy.path=$tiny/base_policy" --out "$policy"
$python -m megatron_scalerl train recipes/tiny_cpu.yaml "$@" "policy.path=$policy"
$python -m megatron_scalerl report "runs/guess_$seed"
$python -m megatron_scalerl show "runs/guess_$seed"
