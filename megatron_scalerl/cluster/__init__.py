"""Runs on Slurm, on one node or several (`megatron-scalerl submit`); checks of a node (`megatron-scalerl doctor`).

slurm_command   `submit`: --status, --array, --dry-run
allocation      nodes, GPUs and CPUs that the run needs
site            the site file: options of sbatch, modules, container, local disks
cluster         calls of sinfo, squeue, scontrol and sbatch
job             the job script, rendered from templates/job.sbatch
submission      refuses wrong input before the submission; writes, checks and submits the job script
slurm_status    the job, unfit nodes, progress, cost and last error of a run

doctor_command -> node: one list of `check.Check`, whose results are compared between nodes
                  gpus (NVML) and probe (packages), each in a separate process
               -> doctor_nodes: all nodes of a Slurm job at once, and the unfit nodes

The checks change and delete no file of the node; the canary makes, tries and removes a new folder.
"""
