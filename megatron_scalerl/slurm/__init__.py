"""Runs on Slurm, one node each: `megatron-scalerl submit`.

command    the command: --status, --array, --dry-run
checks     what is refused before anything is submitted
site       the site file: account, modules, container
cluster    what sinfo, squeue, scontrol and sbatch are asked
job        the job script, rendered from templates/job.sbatch
submission writes the script, has it checked, submits it
status     a run's job, its progress and its last error
"""
