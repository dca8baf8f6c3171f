#!/usr/bin/env bash
# At most twelve minutes on a GPU machine, in the order of what is learned in a minute. Each part has its own time limit and
# ends alone, by SIGINT, so that pytest writes the report of what it has found; output and reports are in RESULTS.
#
#   bash try.sh [RESULTS]       after install.sh; default: results, beside this script
set -uo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
results="${1:-$here/results}"
python="${MSRL_PYTHON:-python3}"
mkdir -p "$results"
results="$(cd "$results" && pwd)"
. "${MSRL_SITE:-$here/site}/activate"
cd "${MSRL_SITE:-$here/site}/checkout"
part() { # NAME SECONDS COMMAND...
  local began=$SECONDS code=0
  timeout --signal=INT --kill-after=10 "$2" "${@:3}" >"$results/$1.log" 2>&1 || code=$?
  echo "try.sh: $1: exit code $code, $((SECONDS - began)) s: $(tail -n 1 "$results/$1.log" | cut -c1-160)"
}
checks() { part "$1" "$2" "$python" -m pytest -q -m gpu -p no:cacheprovider --gpu-report "$results/$1" "${@:3}"; }
nvidia-smi 2>/dev/null | tee "$results/nvidia-smi.log" | sed -n 's/.*| *\(NVIDIA [^|]*\)|.*/try.sh: \1/p'
checks logits 90 tests/gpu/test_gpu_environment.py tests/gpu/test_gpu_logits.py tests/gpu/test_gpu_losses.py
part bench_logits 150 "$python" tools/bench_logits.py --device gpu --rounds 3
checks trainer 120 tests/gpu/test_gpu_trainer.py tests/gpu/test_gpu_families.py
checks weights 60 tests/gpu/test_gpu_weights.py
checks engine 150 tests/gpu/test_gpu_engine.py tests/gpu/test_gpu_loop.py
part bench_shapes 120 "$python" tools/bench_shapes.py --layers te --assumptions "$results/shapes.yaml"
echo "try.sh: reports and logs: $results"
