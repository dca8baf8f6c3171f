"""What the planner predicts for the weight updates of an existing run. Imports torch only where there is a policy."""

from __future__ import annotations

from pathlib import Path

from megatron_scalerl.page.update_report import PredictedUpdate
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.recipe.file import load_run_recipe


def predicted_update(run_dir: str | Path) -> PredictedUpdate | str:
    """A whole update of the run's recipe, or in one line why it cannot be predicted.

    The policy's config.json is that of policy.path, from the working directory.
    """
    try:
        recipe = load_run_recipe(run_dir)
        if not (Path(recipe.policy.path) / "config.json").is_file():
            return printable(f"No prediction: policy.path: expected config.json in {recipe.policy.path}, found none.")

        from megatron_scalerl.plan.counting import load_family  # these imports take seconds
        from megatron_scalerl.plan.sharding import layout_of
        from megatron_scalerl.plan.update import EngineShape, update_work

        family, _ = load_family(recipe.policy.path)
        work = update_work(recipe, family, layout_of(recipe, family, recipe.trainer.world_size))
    except (ValueError, OSError, ImportError) as error:  # ImportError: on a host for reports alone, without torch
        return printable(f"No prediction: {type(error).__name__}: {' '.join(str(error).split())[:500]}.")
    rate, copies = recipe.weights.link_gb_s * 1e9, recipe.engine.count * EngineShape.of(recipe.engine.vllm).data
    return PredictedUpdate(
        bytes=sum(work.sent.values()),
        senders=work.senders,
        most_sent=work.most_sent,
        most_received=work.most_received,
        seconds=work.seconds(rate, copies) if rate else None,
    )
