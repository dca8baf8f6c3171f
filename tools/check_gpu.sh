#!/usr/bin/env bash
# Checks the GPUs of this machine, also where nothing is installed yet.
#
#   tools/check_gpu.sh [OPTION ...]     the options are those of megatron-scalerl check-gpu
#
# Takes the python3 on PATH if it imports torch and megatron.core (an entered environment, a container), else .venv,
# which tools/install.sh gpu makes if it is not there.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$(command -v python3 || true)"
if [ -z "$python" ] || ! "$python" -c 'import torch, megatron.core' 2>/dev/null; then
  [ -x .venv/bin/python ] || bash tools/install.sh gpu
  python=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m megatron_scalerl check-gpu "$@"
