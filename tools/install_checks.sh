# What tools/install.sh asks of a machine before it downloads anything; read by it with `.`, not run.
# Each check ends the installation with one line: what was expected, what was found. Exit code 2 is the caller's machine or
# mistake, 1 (`fail`) a step that failed.

die() { echo "install.sh: $*" >&2; exit 2; }
fail() { echo "install.sh: $*" >&2; exit 1; }

check_machine() {
  local found; found="$(uname -s) $(uname -m)"
  [ "$found" = "Linux x86_64" ] || die "expected Linux x86_64, found $found"
  command -v c++ >/dev/null || command -v g++ >/dev/null || die "expected a C++ compiler (c++ or g++), found none"
}

# Sets `version`, "3.12" or "3.13".
check_python() { # PYTHON VERSION...
  local python="$1" expected glibc
  shift
  expected="expected Python $(printf '%s or ' "$@" | sed 's/ or $//')"
  [ -n "$python" ] || die "$expected with venv, found none; get one (Debian: packages python$1-venv and python$1-dev; conda:" \
    "conda create -n python$1 python=$1; uv: uv python install $1) and set MSRL_PYTHON to its path"
  version="$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" ||
    die "$expected, and $python does not run; set MSRL_PYTHON"
  case " $* " in *" $version "*) ;; *) die "$expected, found $version at $python; set MSRL_PYTHON" ;; esac
  "$python" -c 'import ensurepip, venv' 2>/dev/null ||
    die "expected Python's venv and ensurepip at $python, found none (Debian: package python$version-venv)"
  # Triton and vLLM compile against them at run time, Transformer Engine at installation
  [ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])')/Python.h" ] ||
    die "expected Python's headers for $python, found no Python.h (Debian: package python$version-dev)"
  glibc="$("$python" -c 'import platform; print(platform.libc_ver()[1])')"
  [ "$(printf '%s\n' 2.31 "$glibc" | sort -V | head -n 1)" = 2.31 ] || die "expected glibc 2.31 or newer, found $glibc"
}

# A folder that exists has the same Python and is of the same kind: pip would keep the other kind's torch, whose version is
# the same. A link is somebody else's environment.
check_venv() { # VENV KIND
  local found
  [ ! -L "$1" ] || die "$1 is a link to $(readlink "$1"): remove it, or name another folder with MSRL_VENV"
  [ -e "$1" ] || return 0
  found="$("$1/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)"
  [ "$found" = "$version" ] ||
    die "$1: expected Python $version, found ${found:-no Python that runs}: remove it, or name another folder with MSRL_VENV"
  found=$(cat "$1/.kind" 2>/dev/null || ls "$1"/.installed-* 2>/dev/null |
    sed -n '1s/.*\.installed-\(.*\)-[0-9a-f]*$/\1/p' || true)
  [ -z "$found" ] || [ "$found" = "$2" ] ||
    die "$1: expected an environment of kind '$2', found one that 'install.sh $found' made: remove it, or name another" \
      "folder with MSRL_VENV"
}

check_disk() { # VENV GIB; on the file system that will hold the folder
  local place free
  place="$(dirname "$1")"
  free=$(df -Pk "$place" | awk 'NR==2 {print int($4 / 1048576)}') || die "$place: expected a folder, found none"
  [ "$free" -ge "$2" ] || die "expected $2 GiB free at $(realpath -m "$place"), found $free GiB"
}

# The folder of a CUDA toolkit: nvcc on PATH may be a script that calls it, so its headers are looked for.
find_cuda_home() {
  local found nvcc
  nvcc=$(command -v nvcc || true)
  for found in "${CUDA_HOME:-}" "${CUDA_PATH:-}" "${nvcc:+$(dirname "$(dirname "$(readlink -f "$nvcc")")")}" \
    /usr/local/cuda /usr/local/cuda-13*; do
    [ -n "$found" ] && [ -x "$found/bin/nvcc" ] && [ -e "$found/include/cuda_runtime.h" ] && { echo "$found"; return; }
  done
  return 1
}

# What the driver can run, as CUDA's own library says it: 13000 for 13.0. A compatibility package on LD_LIBRARY_PATH counts.
driver_cuda() {
  "$python" - <<'PYTHON'
import ctypes

found = ctypes.c_int(0)
try:
    code = ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
except OSError:
    code = 1
print(0 if code else found.value)
PYTHON
}

# Sets `cuda_home`.
check_cuda() { # yes|no, whether this machine's driver counts
  local release cuda
  cuda_home=$(find_cuda_home) ||
    die "expected a CUDA 13 toolkit (nvcc and its headers) to compile Transformer Engine with, found none; set CUDA_HOME"
  release=$("$cuda_home/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
  [ "${release%%.*}" = 13 ] || die "expected nvcc of CUDA 13, found ${release:-an unknown release} at $cuda_home; set CUDA_HOME"
  [ "$1" = yes ] || return 0
  cuda=$(driver_cuda)
  [ "$cuda" != 0 ] || die "expected an NVIDIA driver (libcuda.so.1), found none; tools/install.sh cpu is for a machine without a GPU, tools/install.sh gpu --without-gpu for the GPUs of another"
  [ "$cuda" -ge 13000 ] ||
    die "expected a driver of CUDA 13.0 or newer (branch 580), found one of CUDA $((cuda / 1000)).$((cuda % 1000 / 10))"
}

# One a core, but a compiler of Transformer Engine's files takes about 2 GiB, of what a job may use where a cgroup limits it.
compilers_at_a_time() {
  local cores memory limit
  cores=$(nproc)
  memory=$(awk '/MemAvailable/ {print int($2 / 2097152)}' /proc/meminfo)
  limit=$(cat "/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/memory.max" 2>/dev/null || echo max)
  [ "$limit" = max ] || memory=$((limit / 2147483648 < memory ? limit / 2147483648 : memory))
  echo $((memory < 1 ? 1 : memory < cores ? memory : cores))
}
