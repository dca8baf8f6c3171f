#!/usr/bin/env bash
# Installs what the tests need and runs them, each once.
#
#   tests/run.sh         the CI tier: the fast tests under Python 3.11, the slow ones under Python 3.12 where there is one
#   tests/run.sh --fast  the fast tests: no engine, one process each
#   tests/run.sh --all   the CI tier's tests and those that only this tier has: the whole grid of layouts, every crash
#                        point, Slurm jobs that run long. By hand, before a change of processes, weights, checkpoints or
#                        Slurm is called done
#   tests/run.sh --newest  the CI tier's tests with the newest release of every package, and says what is newer than the locks
#   tests/run.sh --help  this text; installs and runs nothing
#
# Further arguments, such as a folder, go to pytest. MSRL_TEST_WORKERS pytest workers share the tests, a file each at a
# time: 2 by default, and 3 for the slow ones, which wait for other processes much of the time. The exit code is not 0
# where any test failed.
set -euo pipefail
{ # read to its end before it runs: a file may change while this takes its minutes
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
tier=ci
case "${1:-}" in
  -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
  --fast) tier=fast; shift ;;
  --all) tier=all; shift ;;
  --newest) tier=newest; shift ;;
esac
fast="not slow and not full" slow="slow and not full"
[ "$tier" != all ] || slow="slow or full"

running=
stop() { # nothing is left running where a check fails or a signal but SIGKILL ends this; pytest ends its processes on SIGINT
  [ -z "$running" ] || kill -INT -- "-$running" 2>/dev/null || true
  wait
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
code=0
run_tests() { # VENV WORKERS MARKS ARGUMENT...: in a process group, which `stop` can interrupt; sets code where one fails
  set -m
  "$1/bin/python" -m pytest -q -n "${MSRL_TEST_WORKERS:-$2}" --dist loadfile --no-loadscope-reorder -p no:cacheprovider \
    --durations=40 -m "$3" "${@:4}" </dev/null &
  running=$!
  set +m
  local ended=0
  wait "$running" || ended=$?
  running=
  [ "$ended" != 5 ] || [ $# = 3 ] || ended=0 # a folder may have no tests of these marks
  code=$((code ? code : ended))
}

if [ "$tier" = newest ]; then
  MSRL_VENV=.venv-newest tools/install.sh newest
  run_tests .venv-newest 2 "$fast" "$@"
  run_tests .venv-newest 3 "$slow" "$@"
  exit "$code"
fi
second= venv=.venv
[ "$tier" = fast ] || second=$(tools/find_python.sh 3.12) || echo "run.sh: no Python 3.12 with venv: the slow tests run under 3.11"
if [ -n "$second" ]; then # beside the first installation and the fast tests: it mostly waits
  MSRL_PYTHON="$second" MSRL_VENV=.venv-3.12 tools/install.sh cpu >.venv-3.12.log 2>&1 &
  installing=$! venv=.venv-3.12
fi
tools/install.sh cpu
.venv/bin/ruff check .
.venv/bin/ruff format --check -q .
if [ "$tier" != fast ]; then
  .venv/bin/mypy
  NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build -q
fi
run_tests .venv 2 "$fast" "$@"
if [ "$tier" != fast ]; then
  [ -z "$second" ] || wait "$installing" || { cat .venv-3.12.log; exit 1; }
  for extra in "ray tests/launch/test_ray.py" "notebooks tests/test_notebooks.py"; do
    [ "$tier" = all ] || break
    "$venv/bin/python" -m pip install -q $(sed -n "/^${extra% *} =/,/^[a-z]/s/^    \([a-z]\)/\1/p" setup.cfg) ||
      echo "run.sh: the extra ${extra% *} could not be installed: ${extra#* } is skipped"
  done
  echo "run.sh: the slow tests, $venv"
  run_tests "$venv" 3 "$slow" "$@"
fi
exit "$code"
}
