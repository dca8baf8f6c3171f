{% if modules %}
type module >/dev/null 2>&1 || . /etc/profile
{% for module in modules %}
module load {{ module | quote }} || exit 1
{% endfor %}
{% endif %}
{% for name, value in environment.items() %}
export {{ name }}={{ value | quote }}
{% endfor %}
export SLURM_EXPORT_ENV=ALL  # steps get what is set above, not only what --export lists for the job
{% if cpus %}
export SRUN_CPUS_PER_TASK={{ cpus }}  # since Slurm 22.05 srun does not read SLURM_CPUS_PER_TASK
{% else %}
# a step gets one CPU unless it asks for more: those of the smallest node
cpus=$(tr , '\n' <<<"${SLURM_JOB_CPUS_PER_NODE:-}" | sed 's/(.*//' | sort -n | head -n 1)
[ -z "$cpus" ] || export SRUN_CPUS_PER_TASK="$cpus"
{% endif %}
