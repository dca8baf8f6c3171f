#!/usr/bin/env bash
# Resolves the locks with hashes from scratch: gpu-py312.txt and environments.txt. Downloads metadata only, a few MB.
#
#   tools/locks/resolve.sh [--check]
#
# --check writes nothing and fails where a lock in the repository differs. Releases after $newest do not count, so the
# same files come out at any later time. MSRL_PYTHON is the Python that uv is installed with.
set -euo pipefail
cd "$(dirname "$0")"
newest=2026-11-25T00:00:00Z
uv_version=0.13.9

case "${1:-}" in
  "") ;;
  --check) ;;
  *) echo "resolve.sh: expected --check or nothing, found '$1'" >&2; exit 2 ;;
esac
python="${MSRL_PYTHON:-$(../find_python.sh 3.12 3.13 || true)}"
[ -n "$python" ] || { echo "resolve.sh: expected Python 3.12 or 3.13, found none; set MSRL_PYTHON" >&2; exit 2; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/venv"
"$work/venv/bin/python" -m pip -qq --disable-pip-version-check install "uv==$uv_version" ||
  { echo "resolve.sh: uv $uv_version could not be installed" >&2; exit 1; }

# this package's own requirements, without building it
"$python" - ../../setup.cfg >"$work/package.in" <<'PYTHON'
import configparser
import sys

found = configparser.ConfigParser()
found.read(sys.argv[1], encoding="utf8")
extras = found["options.extras_require"]
print(found["options"]["install_requires"], extras["run"], extras["dev"], sep="\n")
PYTHON

resolve() { # INPUT OUTPUT [PACKAGE...]: with this package, whose inputs but PACKAGE are constrained by cpu.txt
  local input="$1" output="$2" free ours=()
  shift 2
  if [ $# != 0 ]; then
    free=$(printf '|%s' "$@")
    grep -vE "^(${free:1})==" cpu.txt >"$work/constraints.txt"
    ours=("$work/package.in" --constraints "$work/constraints.txt")
  fi
  UV_PYTHON_DOWNLOADS=never "$work/venv/bin/uv" --config-file metadata.toml pip compile "$input" "${ours[@]}" \
    --python-platform x86_64-manylinux_2_31 --python-version 3.12 \
    --only-binary :all: --no-binary transformer-engine-torch --exclude-newer "$newest" --format pylock.toml --quiet \
    --output-file "$work/pylock.toml" || { echo "resolve.sh: $input has no solution for Python 3.12" >&2; exit 1; }
  "$python" - "$work/pylock.toml" >"$work/requirements" <<'PYTHON'
import sys
import tomllib

with open(sys.argv[1], "rb") as file:
    packages = tomllib.load(file)["packages"]
for package in packages:
    files = package.get("wheels") or [package["sdist"]]
    hashes = sorted({file["hashes"]["sha256"] for file in files})
    print(f"{package['name']}=={package['version']} \\\n    " + " \\\n    ".join(f"--hash=sha256:{h}" for h in hashes))
PYTHON
  {
    echo "# Python 3.12, Linux x86-64, glibc 2.31 or newer. Made by tools/locks/resolve.sh from $input; do not edit."
    cat "$work/requirements"
  } >"$work/$output"
  rm "$work/pylock.toml" "$work/requirements"
}

resolve gpu.in gpu-py312.txt triton apache-tvm-ffi
resolve environments.in environments.txt
for lock in gpu-py312.txt environments.txt; do
  count=$(grep -c '==' "$work/$lock")
  if cmp -s "$work/$lock" "$lock"; then
    echo "resolve.sh: $lock is up to date, $count packages"
  elif [ "${1:-}" = --check ]; then
    diff "$lock" "$work/$lock" | head -n 20 >&2 || true
    echo "resolve.sh: $lock differs" >&2
    exit 1
  else
    cp "$work/$lock" "$lock"
    echo "resolve.sh: $lock written, $count packages"
  fi
done
