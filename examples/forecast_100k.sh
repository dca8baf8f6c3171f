#!/usr/bin/env bash
# Forecast a 100,000 GPU-hour run from its first half, and compare it with the measured second half; then from less.
#
#   examples/forecast_100k.sh [FOLDER]
#
# The run is the 8B model at batch 2048 of Khatri et al. (2025, arXiv 2510.13786), Fig. 1a, digitized. Prints every
# point beyond 50k GPU-hours, forecast against measured; writes forecast_100k.{png,svg,html} to FOLDER (default: .).
# The default prior was learned from known runs, this one among them: it is no test of the method.
# docs/forecast_method.md has the errors on runs that are left out.
# Runs with PYTHON, else the project's .venv, else python.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
out="${1:-.}"
python="$here/.venv/bin/python"
[ -x "$python" ] || python=python
fit() {
  PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}" "${PYTHON:-$python}" -m megatron_scalerl fit \
    "$here/examples/curves/points.csv" --series figure=fig1a_scalerl_100k --series series=ScaleRL-bs2048-8B \
    --r0 0.4018 --prompts 1000 --generations 16 --predict 100000 "$@"
}
fit --fit-until 50000 --budget 50000 --plot "$out/forecast_100k.png" --html "$out/forecast_100k.html"
echo
echo "At 100k GPU-hours, from less of the run (measured: 0.637, the mean of the two points beyond 100k):"
for seen in 8k 16k 24k 32k 50k; do
  fit --fit-until "${seen%k}000" | sed -n "s/.* 100k[^0-9]*\([0-9.]*\)[^[]*\(\[.*\]\).*/  first $seen: \1 \2/p"
done
echo "In-sample: the default prior was learned from known runs, and this run is one of them."
