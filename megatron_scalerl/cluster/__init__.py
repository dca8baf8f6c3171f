"""Runs on Slurm, on one node or several (`megatron-scalerl submit`); checks of a node (`megatron-scalerl doctor`).

slurm_command   `submit`: --status, --array, --dry-run
allocation      nodes, GPUs and CPUs that the run needs
site            the site file: options of sbatch, modules, container, local disks
cluster         calls of sinfo, squeue, scontrol and sbatch
job             the job script, rendered from templates/job.sbatch
submission      what is refused before anything is submitted; writes the script, has it checked, submits it
slurm_status    a run's job and the nodes of it that are unfit or down, its progress, cost and last error

doctor_command -> node: one list of `check.Check`, by whose results nodes are compared
                  gpus (NVML) and probe (packages), each in a separate process
               -> doctor_nodes: all nodes of a Slurm job at once, and which of them are unfit

The checks change and delete nothing on the node, except for a folder that the canary makes, tries and removes.
"""
