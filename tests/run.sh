#!/usr/bin/env bash
# Installs what the tests need and runs them, each once.
#
#   tests/run.sh         the CI tier: the fast tests and the slow ones, in .venv
#   tests/run.sh --fast  the fast tests: no engine, one process each
#   tests/run.sh --all [tests/FOLDER ...]  the CI tier's tests and those that only this tier has, a folder at a time: the
#                        whole grid of layouts, every crash point, Slurm jobs that run long. By hand, before a change of
#                        processes, weights, checkpoints or Slurm is called done. The fast tests run once more under
#                        Python 3.13 where there is one. A folder that passed before runs again only if something that
#                        its tests import has changed since
#   tests/run.sh --changed [COMMIT]  fast and slow tests that import, at any depth, a file that differs from COMMIT
#                        (default: HEAD~1), and each changed test file once more, alone in a fresh process
#   tests/run.sh --poor  the fast tests with 256 MiB for temporary files, an empty HOME, umask 077, LANG=C and one CPU (needs root)
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
  -h | --help) sed -n '2,22s/^# \{0,1\}//p' "$0"; exit 0 ;;
  --fast | --all | --changed | --poor | --newest) tier="${1#--}"; shift ;;
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
if [ "$tier" != fast ]; then # beside the first installation and the fast tests: it mostly waits
  MSRL_VENV=.venv-environments tools/install.sh environments >.venv-environments.log 2>&1 &
  installing=$!
fi
tools/install.sh cpu
.venv/bin/ruff check .
.venv/bin/ruff format --check -q .
.venv/bin/python tools/house_size.py --check
if [ "$tier" = poor ]; then
  poor=$(mktemp -d)
  mount -t tmpfs -o size=256m none "$poor" || { echo "run.sh: --poor mounts a small file system, which needs root"; exit 1; }
  mkdir "$poor/home" "$poor/tmp" "$poor/bin"
  printf '#!/bin/sh\necho "Filesystem 1K-blocks Used Available Use%% Mounted on"\necho "none 1048576 0 1048576 0%% /"\n' >"$poor/bin/df"
  chmod +x "$poor/bin/df"
  export HOME="$poor/home" TMPDIR="$poor/tmp" LANG=C LC_ALL=C PATH="$poor/bin:$PATH" MSRL_TEST_WORKERS=1
  umask 077
  taskset -cp 0 $$ >/dev/null
  run_tests .venv 1 "$fast" "$@"
  umount -l "$poor"
  exit "$code"
fi
if [ "$tier" = ci ] || [ "$tier" = all ]; then
  .venv/bin/mypy
  NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build -q
fi
environments_ready() { # waits for the environment of the library verifiers
  wait "$installing" || compgen -G ".venv-environments/lib/python*/site-packages/verifiers-*" >/dev/null || {
    echo "run.sh: tests/rollouts/test_verifiers.py is skipped: tools/install.sh environments failed; the end of its log:"
    tail -n 5 .venv-environments.log
  }
}
extras() { # packages of tests that only --all has
  local extra
  for extra in "ray tests/launch/test_ray.py" "notebooks tests/test_notebooks.py"; do
    .venv/bin/python -m pip install -q $(sed -n "/^${extra% *} =/,/^[a-z]/s/^    \([a-z]\)/\1/p" setup.cfg) ||
      echo "run.sh: the extra ${extra% *} could not be installed: ${extra#* } is skipped"
  done
}
case "$tier" in
  fast) run_tests .venv 2 "$fast" "$@" ;;
  ci)
    run_tests .venv 2 "$fast" "$@"
    environments_ready
    echo "run.sh: the slow tests"
    run_tests .venv 3 "$slow" "$@"
    ;;
  changed)
    base="${1:-HEAD~1}"
    mapfile -t tests < <(.venv/bin/python tests/changed.py "$base")
    mapfile -t alone < <(.venv/bin/python tests/changed.py --files "$base")
    [ "${#tests[@]}" != 0 ] || { echo "run.sh: no test imports what differs from $base"; exit 0; }
    echo "run.sh: ${#tests[@]} test files import what differs from $base"
    run_tests .venv 2 "$fast" "${tests[@]}"
    environments_ready
    run_tests .venv 3 "$slow" "${tests[@]}"
    for file in "${alone[@]}"; do
      run_tests .venv 0 "not full" "$file"
    done
    ;;
  all)
    environments_ready
    extras
    if newer=$(tools/find_python.sh 3.13); then
      MSRL_PYTHON="$newer" MSRL_VENV=.venv-3.13 tools/install.sh cpu
    else
      echo "run.sh: no Python 3.13 with venv: the fast tests do not run under it"
    fi
    noted="$(git rev-parse --git-dir)/all-passed" # FOLDER COMMIT SECONDS
    touch "$noted"
    [ $# != 0 ] || set -- tests/*/ tests/test_*.py
    for folder in "$@"; do
      folder="${folder%/}"
      before=$(awk -v folder="$folder" '$1 == folder {print $2}' "$noted" | tail -n 1)
      if [ -n "$before" ] && [ -z "$(.venv/bin/python tests/changed.py "$before" "$folder")" ]; then
        echo "run.sh: $folder passed at $(grep "^$folder " "$noted" | tail -n 1 | cut -d' ' -f2-) s; nothing that it imports has changed"
        continue
      fi
      all=$code code=0 began=$SECONDS
      run_tests .venv 2 "$fast" "$folder"
      [ -z "$newer" ] || run_tests .venv-3.13 2 "$fast" "$folder"
      run_tests .venv 3 "$slow" "$folder"
      [ "$code" != 0 ] || [ -n "$(git status --porcelain)" ] || echo "$folder $(git rev-parse HEAD) $((SECONDS - began))" >>"$noted"
      code=$((all ? all : code))
    done
    ;;
esac
exit "$code"
}
