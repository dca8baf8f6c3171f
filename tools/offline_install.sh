#!/usr/bin/env bash
# Installs a bundle of tools/offline_bundle.sh without a package index: its packages into FOLDER beside what python3 has.
#
#   bash install.sh [FOLDER]       default: site, beside this script. Then `. FOLDER/activate` sets PYTHONPATH
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
site="${1:-$here/site}"
python="${MSRL_PYTHON:-python3}"
mkdir -p "$site"
site="$(cd "$site" && pwd)"
for first in "$here"/wheels/*.part_aa; do # joined again where they were split
  [ ! -e "$first" ] || { cat "${first%aa}"* >"${first%.part_aa}" && rm "${first%aa}"*; }
done
pip() { "$python" -m pip --disable-pip-version-check "$@"; }
pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target "$site" "$here"/wheels/*.whl
mkdir -p "$site/checkout"
tar -xzf "$here/megatron_scalerl.tar.gz" -C "$site/checkout"
# a folder of its own, since pip would replace $site/bin; it holds the entry points, and the checkout the package
PYTHONPATH="$site" pip install -q --no-index --no-deps --no-build-isolation --no-compile --target "$site/own" --upgrade \
  "$site/checkout"
rm -rf "$site/own/megatron_scalerl" "$site/checkout/build"
nvidia=$(PYTHONPATH="$site" "$python" -c 'import torch, pathlib; print(pathlib.Path(torch.__file__).parent.parent / "nvidia")' || true)
source=$(ls "$here"/wheels/transformer?engine?torch-*.tar.gz 2>/dev/null || true)
toolkit= # the first with a compiler: the machine's, or what the bundle or torch's packages bring
for folder in "${CUDA_HOME:-}" /usr/local/cuda "$site/nvidia/cu13" "$nvidia/cu13"; do
  [ -n "$toolkit" ] || [ ! -x "$folder/bin/nvcc" ] || toolkit="$folder"
done
if [ -n "$source" ] && [ -n "$toolkit" ]; then
  echo "install.sh: compiling Transformer Engine's torch extension (some minutes on many cores, an hour on one)"
  PYTHONPATH="$site" NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE PATH="$site/bin:$toolkit/bin:$PATH" \
    CUDA_HOME="$toolkit" \
    CPATH="$nvidia/cudnn/include:$nvidia/nccl/include:$toolkit/include:$toolkit/include/cccl${CPATH:+:$CPATH}" \
    pip install -q --no-index --no-deps --no-build-isolation --target "$site" "$source" || true
fi
if [ -e "$site/transformer_engine" ] && [ -z "$(find "$site" -name 'transformer_engine_torch*.so')" ]; then
  echo "install.sh: no torch extension: Transformer Engine is taken out again, and Megatron's plain layers serve"
  rm -rf "$site"/transformer_engine* # with half of it Megatron-Core would not import
fi
cat >"$site/activate" <<ACTIVATE
export PYTHONPATH="$site/checkout:$site/own:$site\${PYTHONPATH:+:\$PYTHONPATH}" PATH="$site/own/bin:$site/bin:\$PATH"
# Transformer Engine looks for them beside Python's own packages
export CUDNN_HOME="$nvidia/cudnn" NVRTC_HOME="$nvidia/cu13" CURAND_HOME="$nvidia/cu13"
export LD_LIBRARY_PATH="$nvidia/cudnn/lib:$nvidia/cu13/lib\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
export HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1 TOKENIZERS_PARALLELISM=false
ACTIVATE
. "$site/activate"
cd "$site/checkout"
"$python" - <<'PYTHON'
import importlib

for name in ("torch", "megatron.core", "transformer_engine.pytorch", "vllm", "megatron_scalerl.trainer.step"):
    try:
        module = importlib.import_module(name)
        print(f"install.sh: {name} {getattr(module, '__version__', '')}".rstrip())
    except Exception as error:
        print(f"install.sh: {name} does not import: {type(error).__name__}: {str(error)[:200]}")
PYTHON
echo "install.sh: done; now: . $site/activate"
