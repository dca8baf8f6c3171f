#!/usr/bin/env bash
# Checks the GPUs of this machine, even if nothing is installed yet.
#
#   tools/check_gpu.sh [OPTION ...]     options of megatron-scalerl check-gpu
#
# Uses the environment MSRL_VENV if set, otherwise the python3 on PATH if it imports torch and megatron.core (an activated
# environment, a container), otherwise .venv. A missing environment is created by tools/install.sh gpu, for --rehearse by
# tools/install.sh cpu.
set -euo pipefail
cd "$(dirname "$0")/.."
python="$(command -v python3 || true)"
if [ -n "${MSRL_VENV:-}" ] || [ -z "$python" ] || ! "$python" -c 'import torch, megatron.core' 2>/dev/null; then
  venv="${MSRL_VENV:-.venv}"
  kind=gpu
  case " $* " in *" --rehearse "*) kind=cpu ;; esac
  [ -x "$venv/bin/python" ] || tools/install.sh "$kind"
  python="$venv/bin/python"
fi
echo "check_gpu.sh: $python" >&2
# the package itself, if it is not installed in the environment
"$python" -c 'import megatron_scalerl' 2>/dev/null || export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m megatron_scalerl check-gpu "$@"
