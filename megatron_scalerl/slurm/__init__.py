"""Runs on Slurm, on one node or several: `megatron-scalerl submit`.

command    the command: --status, --array, --add-engines, --dry-run
checks     what is refused before anything is submitted
allocation nodes, GPUs and CPUs that the fleet needs
site       the site file: account, modules, container
cluster    what sinfo, squeue, scontrol and sbatch are asked
job        the job script, rendered from templates/job.sbatch
submission writes the script, has it checked, submits it
engines    a job of engines that join a run: templates/engines.sbatch
budget     GPU-hours spent and left
status     a run's job, its progress and its last error
nodes      the nodes of its job that are unfit or down
"""
