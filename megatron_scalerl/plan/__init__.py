"""The planner: whether a recipe fits its GPUs, and what it costs, before any GPU is asked for.

    recipe, config.json -> counting (parameters of every rank) -> memory (trainer), engine (weights, KV cache)
                        -> work (tokens, FLOPs, seconds) -> simulate (the PipelineRL-k queue) -> split -> text, JSON

`command` is the command line, `planner.make_plan` the same for programs. What is assumed and not computed stands in
`assumptions` and `hardware`, each figure with its source.
"""
