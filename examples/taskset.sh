#!/usr/bin/env bash
# A taskset of verifiers at a small scale, after tools/install.sh cpu and tools/install.sh environments: the tiny policy
# learns to guess a number.
#
#   examples/taskset.sh [key=value ...]
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=examples/taskset
python="${PYTHON:-.venv/bin/python}"
tiny=runs/tiny_guess
set -- overlay=examples/taskset/guess.yaml name=guess "prompts.path=$tiny/games.jsonl" prompts.held_out_path=null \
  "sft.path=$tiny/guess_sft.jsonl" "$@"

$python -m megatron_scalerl.tiny $tiny --seed 1
$python -m megatron_scalerl.environments.verifiers examples/taskset/guess.toml > $tiny/games.jsonl
.venv-environments/bin/python examples/taskset/guess.py > $tiny/guess_sft.jsonl
[ -e $tiny/guess_policy/config.json ] ||
  $python -m megatron_scalerl sft recipes/tiny_cpu.yaml "$@" policy.path=$tiny/base_policy --out $tiny/guess_policy
$python -m megatron_scalerl train recipes/tiny_cpu.yaml "$@" policy.path=$tiny/guess_policy
$python -m megatron_scalerl report runs/guess
$python -m megatron_scalerl show runs/guess
