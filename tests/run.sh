#!/usr/bin/env bash
# Installs what the tests need and runs them.
#
#   tests/run.sh               the CI tier: everything but what needs more than 25 minutes, and --fast under Python 3.12,
#                              where there is one
#   tests/run.sh --fast        no engine, one process each
#   tests/run.sh --all         everything, at most 80 minutes
#   tests/run.sh --python-3.12 --fast under Python 3.12, in .venv-3.12
#   tests/run.sh --torch-2.11  --fast but for vLLM under Python 3.12, torch 2.11, Triton 3.6, numpy 2.5, in
#                              .venv-torch-2.11: 6 GB of packages
#   tests/run.sh --help        this text; installs and runs nothing
#
# The CI tier and --fast use two cores: build/tests-beside.log has the output of the second until it is shown.
# Further arguments go to pytest, in one process. The exit code is not 0 where any test failed.
set -euo pipefail
{ # read to its end before it runs: a file may change while this takes its minutes
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
fast=(-m "not slow and not full")
# what imports vLLM or packages that only vLLM brings, and what starts a run, which is refused without vLLM
need_vllm=(--ignore=tests/{engine/test_engine,engine/test_engine_options,checkpoints/test_vllm,controller/test_preflight}.py
  --deselect=tests/test_command_line.py::test_{what_fails_under_way_is_no_mistake_of_the_users,a_policy_without_a_tokenizer_is_2}
  --deselect=tests/test_documented_commands.py::test_the_readmes_recipe_starts
  --deselect=tests/controller/test_longest_sequence.py::test_a_recipe_that_says_its_capacity_keeps_it
  --deselect=tests/test_install.py::test_every_package_of_the_cpu_lock_runs_on_the_first_python_3_11)

install_3_12() { # PYTHON; a separate environment beside the main one
  MSRL_PYTHON="$1" MSRL_VENV=.venv-3.12 tools/install.sh cpu
}

fast_3_12() {
  .venv-3.12/bin/python -m pytest -q "${fast[@]}"
}

torch_2_11() {
  tools/install.sh torch-2.11 &&
    .venv-torch-2.11/bin/python -m pytest -q "${fast[@]}" "${need_vllm[@]}" "$@"
}

lint_types_and_docs() {
  .venv/bin/mypy
  NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build -q
}

# Each pytest is in a process group of its own, which `stop` can interrupt, and this script can be interrupted while it waits.
run_tests() { # COMMAND...; sets code where it fails
  set -m
  "$@" </dev/null &
  tests=$!
  set +m
  wait "$tests" || code=$((code ? code : $?))
  tests=
}

start_beside() { # PYTEST-OPTION...: on the second core
  mkdir -p build
  : >build/tests-beside.log  # `tail` may come first
  set -m
  .venv/bin/python -m pytest -q -p no:cacheprovider "$@" >>build/tests-beside.log 2>&1 </dev/null &
  beside=$!
  set +m
}

end_beside() { # shows what it has printed, and the rest as it comes; sets code where it fails
  echo "run.sh: the tests that run beside these"
  tail -n +1 -f --pid="$beside" build/tests-beside.log
  wait "$beside" || code=$((code ? code : $?))
  beside=
}

# Slow tests of one process: a third of the time of all slow ones, beside the others, which are several processes each.
late=(tests/{commands,fit,rewards,rollouts,weights} tests/test_*.py)
# Half of the work of the fast tests.
half=(tests/{cluster,commands,fit,launch,logits,page,plan,rewards,slurm,test_phases.py,weights})
code=0
tier=
select=(-m "not full")
second=
case "${1:-}" in
  -h | --help) sed -n '2,15s/^# \{0,1\}//p' "$0"; exit 0 ;;
  --fast)
    tier=fast select=("${fast[@]}")
    shift
    [ "$#" = 0 ] || tier=fast_some
    ;;
  --all) select=(); shift ;;
  --python-3.12)
    python=$(tools/find_python.sh 3.12) || { echo "run.sh: expected Python 3.12 with venv, found none" >&2; exit 2; }
    install_3_12 "$python"
    .venv-3.12/bin/python -m pytest -q "${fast[@]}" "${@:2}"
    exit
    ;;
  --torch-2.11) torch_2_11 "${@:2}"; exit ;;
  "")
    tier=ci
    second=$(tools/find_python.sh 3.12) || echo "run.sh: Python 3.12 is left out: found none with venv"
    ;;
esac
# Both environments are installed at once: an installation uses one core.
installing=
tests=
beside=
stop() { # nothing is left running where a linter fails or a signal but SIGKILL ends this; pytest ends its processes on SIGINT
  local each
  for each in $tests $beside; do kill -INT -- "-$each" 2>/dev/null || true; done
  [ -z "$beside" ] || { echo "run.sh: the end of build/tests-beside.log"; tail -n 40 build/tests-beside.log; }
  wait
}
trap stop EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
if [ -n "$second" ]; then
  install_3_12 "$second" >.venv-3.12.log 2>&1 &
  installing=$!
fi
tools/install.sh cpu
.venv/bin/ruff check .
.venv/bin/ruff format --check -q .
case "$tier" in
  ci)
    start_beside -m "slow and not full" "${late[@]/#/--ignore=}"
    lint_types_and_docs
    run_tests .venv/bin/python -m pytest -q "${fast[@]}"
    run_tests .venv/bin/python -m pytest -q -m "slow and not full" "${late[@]}"
    if [ -n "$second" ]; then
      echo "run.sh: the fast tier under Python 3.12"
      if wait "$installing"; then run_tests fast_3_12; else code=$((code ? code : $?)); fi
      cat .venv-3.12.log
    fi
    end_beside
    ;;
  fast)
    start_beside "${fast[@]}" "${half[@]}"
    run_tests .venv/bin/python -m pytest -q "${fast[@]}" "${half[@]/#/--ignore=}"
    end_beside
    ;;
  *)
    [ "$tier" = fast_some ] || lint_types_and_docs
    run_tests .venv/bin/python -m pytest -q "${select[@]}" "$@"
    ;;
esac
exit "$code"
}
