#!/usr/bin/env bash
# Makes a folder with what a GPU machine without a package index needs: this checkout (tests/gpu too), the locked packages,
# and the scripts that install and try them there.
#
#   tools/offline_bundle.sh OUT [--have FREEZE] [--only "NAME ..."] [--part MIB]
#
#   --have    a file of `pip freeze` there: its packages are left out, also in another version, which is said
#   --only    these packages alone, such as those of a machine that has the rest
#   --part    split files above so many MiB, for a copy that limits them; the installation joins them
#
# There:      bash OUT/install.sh [FOLDER]    packages into FOLDER (default OUT/site), for the python3 on the path
#             bash OUT/try.sh [RESULTS]       at most twelve minutes on a GPU; what was found, in RESULTS (default OUT/results)
#
# Needs python3 with pip and git. NOT RUN YET by the authors on a GPU machine.
set -euo pipefail
{ # read to its end before it runs
cd "$(dirname "$0")/.."
die() { echo "offline_bundle.sh: $*" >&2; exit 2; }
case "${1:-}" in "" | -h | --help) sed -n '2,14s/^# \{0,1\}//p' "$0"; exit 0 ;; esac
out="$1" have= only= part=0
shift
while [ $# -gt 0 ]; do
  case "$1" in
    --have) have="$2" ;;
    --only) only="$2" ;;
    --part) part="$2" ;;
    *) die "expected an option (--help), found '$1'" ;;
  esac
  shift 2
done
lock=tools/locks/gpu-py312.txt
[ -z "$have" ] || [ -f "$have" ] || die "--have: expected a file of pip freeze, found none at $have"
for program in git python3; do
  command -v "$program" >/dev/null || die "expected $program on the path, found none"
done
[ ! -e "$out" ] || die "$out exists"
mkdir -p "$out/wheels"
out="$(cd "$out" && pwd)"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

# entries of the lock with their hashes, without what the machine has
python3 - "$lock" "${have:-/dev/null}" "$only" >"$work/wanted.txt" <<'PYTHON'
import re, sys

def key(name):
    return re.sub(r"[-_.]+", "-", name).lower()

lock, have, only = open(sys.argv[1]).read(), open(sys.argv[2]).read(), {key(n) for n in sys.argv[3].split()}
there = {key(n): v for n, v in re.findall(r"^([A-Za-z0-9][\w.-]*)==(\S+)", have, re.M)}
for entry in re.findall(r"^[A-Za-z0-9][^\n]*(?:\n +[^\n]*)*", lock, re.M):
    name, version = re.match(r"([\w.-]+)==([^\s;\\]+)", entry).groups()
    if key(name) in there:
        if there[key(name)].partition("+")[0] != version:
            print(f"offline_bundle.sh: {name} {version} of the lock, {there[key(name)]} there", file=sys.stderr)
    elif (not only or key(name) in only) and key(name) != "transformer-engine-torch":
        print(entry)
PYTHON
count=$(grep -c == "$work/wanted.txt" || true)
[ "$count" -gt 0 ] || die "expected packages to fetch, found none beyond --have and --only"
echo "offline_bundle.sh: $count packages of $lock, by hash"
target=(--only-binary=:all: --python-version 3.12 --implementation cp --abi cp312 --abi abi3 --abi none)
for glibc in $(seq 39 -1 17); do target+=(--platform "manylinux_2_${glibc}_x86_64"); done
target+=(--platform manylinux2014_x86_64 --platform manylinux2010_x86_64 --platform manylinux1_x86_64)
pip() { python3 -m pip --disable-pip-version-check "$@" 2> >(grep -v '^WARNING: Location' >&2); }
pip download -q --no-deps --require-hashes "${target[@]}" -d "$out/wheels" -r "$work/wanted.txt"
if [ -z "$only" ] && grep -q '^transformer-engine-torch==' "$lock" &&
  ! grep -qi '^transformer[-_.]engine[-_.]torch==' "${have:-/dev/null}"; then # compiled there, against the torch there
  awk '/^[^ #]/ {on = /^transformer-engine-torch==/} on && !/^#/' "$lock" >"$work/source.txt"
  # pip would run its setup.py, which imports torch
  python3 - "$work/source.txt" "$out/wheels" <<'PYTHON' || echo "offline_bundle.sh: no Transformer Engine: see above"
import hashlib, os, re, sys, urllib.parse, urllib.request

entry = open(sys.argv[1]).read()
name, version = re.match(r"([\w.-]+)==([^\s;\\]+)", entry).groups()
page = f"{os.environ.get('PIP_INDEX_URL', 'https://pypi.org/simple').rstrip('/')}/{name}/"
links = re.findall(rf'href="([^"#]+-{re.escape(version)}\.tar\.gz)', urllib.request.urlopen(page, timeout=60).read().decode())
if not links:
    sys.exit(f"{page} has no source of {name} {version}")
data = urllib.request.urlopen(urllib.parse.urljoin(page, links[0]), timeout=60).read()
if hashlib.sha256(data).hexdigest() not in entry:
    sys.exit(f"{links[0]} has another hash than the lock")
open(os.path.join(sys.argv[2], links[0].rsplit("/")[-1]), "wb").write(data)
PYTHON
fi

git archive --format=tar.gz -o "$out/megatron_scalerl.tar.gz" HEAD
cp tools/offline_install.sh "$out/install.sh"
cp tools/offline_try.sh "$out/try.sh"
if [ "$part" -gt 0 ]; then
  find "$out/wheels" -name '*.whl' -size "+${part}M" -exec split -b "${part}M" {} {}.part_ \; -exec rm {} \;
fi
echo "offline_bundle.sh: $out, $(du -sm "$out" | cut -f1) MiB"
exit 0
}
