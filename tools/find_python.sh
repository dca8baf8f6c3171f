#!/usr/bin/env bash
# Prints the path of the first Python of these versions that works, or nothing with exit code 1.
#
#   tools/find_python.sh 3.12 3.13
#
# It has to start (a shim of pyenv may refuse), be of that version, and be able to make a virtual environment
# (Debian keeps that in the package python3-venv).
set -u
works() { # PROGRAM VERSION
  [ "$("$1" -c 'import ensurepip, sys, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" = "$2" ]
}
for version in "$@"; do
  while read -r program; do
    if works "$program" "$version"; then
      echo "$program"
      exit 0
    fi
  done < <(type -aP "python$version"; ls "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python3 2>/dev/null
    type -aP python3)
done
exit 1
