{% if modules %}
no_module() {  # as a role that failed, for --status
  say "$1" | tee "$logs/setup.log"
  echo 1 >"$logs/setup.exit"
  touch "$logs/started"
  exit 1
}
set +u  # scripts of modules read variables that may be unset
type module >/dev/null 2>&1 || . /etc/profile
{% for module in modules %}
module load {{ module | quote }} || no_module {{ ("the module " + module + " could not be loaded") | quote }}
{% endfor %}
set -u
{% endif %}
{% for name, value in environment.items() %}
export {{ name }}={{ value | quote }}
{% endfor %}
# what is compiled on each node's own disk; a job that is queued again finds it where the node keeps it
export MSRL_LOCAL="{{ local }}/megatron-scalerl-${USER:-$UID}/$job"
export SLURM_EXPORT_ENV=ALL  # steps get what is set above, not only what --export lists for the job
{% if cpus %}
export SRUN_CPUS_PER_TASK={{ cpus }}  # since Slurm 22.05 srun does not read SLURM_CPUS_PER_TASK
{% else %}
# a step gets one CPU unless it asks for more: those of the smallest node
cpus=$(tr , '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-}" | sed 's/(.*//' | sort -n | head -n 1)
[ -z "$cpus" ] || export SRUN_CPUS_PER_TASK="$cpus"
{% endif %}
{% if nodes > 1 %}
everywhere=(srun --overlap --ntasks-per-node=1 --cpus-per-task=1 --input=none)
{% else %}
everywhere=()
{% endif %}
relay= again=
leave() {
  [ -z "$relay" ] || kill "$relay" 2>/dev/null
  [ -n "$again" ] || superseded || "${everywhere[@]}" rm -rf "$MSRL_LOCAL"  # nothing of this job comes after
}
trap leave EXIT
