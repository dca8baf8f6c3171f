#!/usr/bin/env bash
# Installs what the tests need and runs them.
#
#   tests/run.sh           the CI tier: everything but what needs more than 25 minutes
#   tests/run.sh --fast    no engine, one process: at most four minutes
#   tests/run.sh --all     everything, at most 80 minutes
#   tests/run.sh --help    this text; installs and runs nothing
#
# Further arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
select=(-m "not full")
case "${1:-}" in
  -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
  --fast) select=(-m "not slow and not full"); shift ;;
  --all) select=(); shift ;;
esac
tools/install.sh cpu
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
.venv/bin/ruff check .
exec .venv/bin/python -m pytest -q "${select[@]}" "$@"
