"""The planner forecasts whether a recipe fits its GPUs and what it costs, before any GPU is allocated.

    recipe, config.json -> counting (parameters of every rank) -> memory (trainer), engine (weights, KV cache)
                        -> work (tokens, FLOPs, seconds) -> simulate (the PipelineRL-k queue) -> split -> text, JSON

`command` is the command line, and `planner.make_plan` is the entry point for programs. `assumptions` and `hardware`
hold every figure that is assumed rather than computed, with its source.
"""
