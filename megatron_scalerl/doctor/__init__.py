"""`megatron-scalerl doctor`: checks of one node before a run starts on it.

    command -> node: one list of `check.Check` and the facts that nodes are compared by
               nvml (a process) -> gpus; versions; limits; space; output; host; digests
               head: what several nodes share
            -> report: table, JSON, and the differences between the JSON files of several nodes
            -> nodes: all nodes of a Slurm job at once, and which of them are unfit

Nothing is changed or deleted on the node, except for a folder that `output` makes, tries and removes. `tests/gpu`
runs kernels and verifies their results; this package only queries.
"""
