"""What the planner predicts for the weight updates of an existing run. Imports torch only where there is a policy."""

from __future__ import annotations

import json
from pathlib import Path

from megatron_scalerl.page.update_report import PredictedUpdate
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.file import load_run_recipe

MOST_WORKERS, MOST_LAYERS, MOST_EXPERTS, MOST_TOKENS = 4096, 1000, 1024, 10_000_000
MOST_WIDTH, MOST_HEADS, MOST_BUCKETS = 1 << 20, 1 << 14, 100_000
"""Of what is predicted for a report: a run's files may say anything, and the plan takes time for each."""
# ImportError: on a host for reports alone, without torch; those of the second line: a strange config.json
_UNEXPECTED = (
    *(ValueError, OSError, ImportError),
    *(ArithmeticError, AttributeError, LookupError, TypeError, AssertionError, RecursionError),
)


def predicted_update(run_dir: str | Path) -> PredictedUpdate | str:
    """A whole update of the run's recipe, or in one line why it cannot be predicted.

    The policy's config.json is that of policy.path, from the working directory.
    """
    try:
        recipe = load_run_recipe(run_dir)
        if not (Path(recipe.policy.path) / "config.json").is_file():
            return printable(f"No prediction: policy.path: expected config.json in {recipe.policy.path}, found none.")
        _check_sizes(recipe)

        from megatron_scalerl.plan.counting import load_family  # these imports take seconds
        from megatron_scalerl.plan.sharding import layout_of
        from megatron_scalerl.plan.update import EngineShape, update_work

        family, _ = load_family(recipe.policy.path)
        work = update_work(recipe, family, layout_of(recipe, family, recipe.trainer.world_size))
    except _UNEXPECTED as error:
        return printable(f"No prediction: {type(error).__name__}: {' '.join(str(error).split())[:500]}.")
    rate, copies = recipe.weights.link_gb_s * 1e9, recipe.engine.count * EngineShape.of(recipe.engine.vllm).data
    return PredictedUpdate(
        bytes=sum(work.sent.values()),
        senders=work.senders,
        most_sent=work.most_sent,
        most_received=work.most_received,
        seconds=work.seconds(rate, copies) if rate else None,
    )


def _check_sizes(recipe: Recipe) -> None:
    """Raises ValueError, naming the key, for sizes that no plan is made of in a moment."""
    path = Path(recipe.policy.path) / "config.json"
    config = json.loads(path.read_bytes())
    found = config.get("text_config", config) if isinstance(config, dict) else {}
    vllm = recipe.engine.vllm
    sizes = [
        ("recipe.yaml: trainer.world_size", recipe.trainer.world_size, MOST_WORKERS),
        *(
            (f"recipe.yaml: engine.vllm.{key}", vllm.get(key, 1), MOST_WORKERS)
            for key in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
        ),
        *(
            (f"{path}: {key}", found.get(key) or 0, most)
            for key, most in {
                "num_hidden_layers": MOST_LAYERS,
                "num_experts": MOST_EXPERTS,
                "num_local_experts": MOST_EXPERTS,
                "vocab_size": MOST_TOKENS,
                **dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), MOST_WIDTH),
                **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), MOST_HEADS),
            }.items()
        ),
    ]
    for name, value, most in sizes:
        if not isinstance(value, int) or value > most:
            raise ValueError(f"{name}: expected a number up to {most}, found {str(value)[:40]}")
    hidden, layers, experts = (
        max(1, *(found.get(key) or 1 for key in keys))
        for keys in (["hidden_size"], ["num_hidden_layers"], ["num_experts", "num_local_experts"])
    )
    width = max(hidden, *(found.get(key) or 1 for key in ("intermediate_size", "moe_intermediate_size")))
    buckets = 3 * 2 * hidden * width * layers * experts // (recipe.weights.bucket_mib << 20)
    if buckets > MOST_BUCKETS:
        raise ValueError(f"{path}: expected weights of up to {MOST_BUCKETS} buckets, found about {buckets}")
