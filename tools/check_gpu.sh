#!/usr/bin/env bash
# Checks the GPUs of this machine, also where nothing is installed yet.
#
#   tools/check_gpu.sh [OPTION ...]     the options are those of megatron-scalerl check-gpu
#
# Takes the environment that MSRL_VENV names; without it the python3 on PATH if that imports torch and megatron.core (an
# entered environment, a container), else .venv. An environment that is not there is made by tools/install.sh gpu, for
# --rehearse by tools/install.sh cpu.
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
# the package itself, where the environment does not have it
"$python" -c 'import megatron_scalerl' 2>/dev/null || export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$python" -m megatron_scalerl check-gpu "$@"
