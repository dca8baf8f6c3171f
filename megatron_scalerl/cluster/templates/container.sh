container=({{ container }})
{% if pyxis %}
inside=(srun --overlap --nodes=1 --ntasks=1 "--nodelist=$SLURMD_NODENAME" --cpu-bind=none --input=none "${container[@]}")
{% else %}
inside=("${container[@]}")
{% endif %}
{% if nodes > 1 %}

# The image has no programs of Slurm: there, srun and scontrol hand their words to this script, which runs the real ones.
# ASKED/words, for each use of one; ASKED/out, what it says; ASKED/code; ASKED/alive, open while somebody waits for it
outside="$logs/outside"
mkdir -p "$outside" && rm -f "$outside/requests" && mkfifo "$outside/requests" || exit 1
cat >"$outside/srun" <<'END'
#!/bin/bash
here=${0%/*}
asked=$(mktemp -d "$here/asked.XXXXXX") && mkfifo "$asked/out" "$asked/alive" || exit 1
printf '%s\0' "${0##*/}" "$@" >"$asked/words"
exec 8<>"$asked/alive"  # the kernel closes it when this process ends, however that happens: then the real one ends, too
trap 'exec 8>&-' TERM INT
(trap '' TERM INT; exec cat "$asked/out" 8>&-) &
output=$!
echo "${asked##*/}" >"$here/requests"
while kill -0 "$output" 2>/dev/null; do wait "$output"; done
code=$(cat "$asked/code")
rm -rf "$asked"
exit "${code:-1}"
END
chmod +x "$outside/srun" && ln -sf srun "$outside/scontrol" || exit 1
inside+=(bash -c 'PATH=$0:$PATH exec "$@"' "$outside")
run_outside() {  # run_outside ASKED, in a shell of its own
  local asked="$outside/$1" words real alive
  mapfile -d '' -t words <"$asked/words"
  local before=("${words[0]}") after=("${words[@]:1}")
  [[ "${before[0]}" = srun || "${before[0]}" = scontrol ]] || return
  exec 6<"$asked/alive" 7>"$asked/out"
  if [ "${before[0]}" = srun ]; then
    while [[ "${after[0]-}" = --* ]]; do
      before+=("${after[0]}")
      after=("${after[@]:1}")
    done
    before+=("${container[@]}")
  fi
  "${before[@]}" "${after[@]}" </dev/null >&7 2>&1 6<&- 7>&- &
  real=$!
  { read -r _ <&6; kill "$real"; } 2>/dev/null 7>&- &
  alive=$!
  wait "$real"
  echo $? >"$asked/code"
  kill "$alive" 2>/dev/null
}
while read -r asked; do run_outside "$asked" & done <>"$outside/requests" &
relay=$!
{% endif %}
