#!/usr/bin/env bash
# Forecast a 100,000 GPU-hour run from its first half, and compare it with the measured second half.
#
#   examples/forecast_100k.sh [FOLDER]
#
# The run is the 8B model at batch 2048 of Khatri et al. (2025, arXiv 2510.13786), Fig. 1a, digitized. Prints every
# point beyond 50k GPU-hours, forecast against measured; writes forecast_100k.{png,svg,html} to FOLDER (default: .).
# Runs with PYTHON, else the project's .venv, else python.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-.}"
python="$here/.venv/bin/python"
[ -x "$python" ] || python=python
PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-$python}" -m megatron_scalerl fit "$here/examples/curves/points.csv" \
  --series figure=fig1a_scalerl_100k --series series=ScaleRL-bs2048-8B \
  --r0 0.4018 --prompts 1000 --generations 16 \
  --fit-until 50000 --predict 100000 --budget 50000 \
  --plot "$out/forecast_100k.png" --html "$out/forecast_100k.html"
