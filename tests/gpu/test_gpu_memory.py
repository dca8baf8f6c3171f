"""Peak memory and speed of full widths: shapes on one GPU, and the layout of the 8B recipe on eight.

The planner's prediction has a bound on a GPU. On a CPU a resident set has none: the code runs at toy widths.
"""

import importlib.util
import json
import math

import bench_shapes
import pytest
from gpu_cases import judge
from gpu_ranks import RECIPE_8B
from predicted_trainer import predict_trainer

from megatron_scalerl.recipe.file import load_recipe

pytestmark = pytest.mark.slow

MEMORY = 0.15
"""Of predicted over measured peak memory, around 1."""
LAYERS_8B = 8
"""Of the recipe's 32: a quarter of its work, built in seconds."""
SHAPES = [("cpu", "plain", "8b")]
SHAPES += [
    pytest.param(("gpu", layers, shape), marks=[pytest.mark.gpu, *([pytest.mark.te] if layers == "te" else [])])
    for layers in ("plain", "te")
    for shape in bench_shapes.SHAPES
]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(shape))
def test_a_shapes_memory_is_as_predicted(shape, ranks, tmp_path, record_property):
    device, layers, name = shape
    asked = bench_shapes.SHAPES[name]
    asked = bench_shapes.toy(asked) if device == "cpu" else asked
    [found] = ranks(1, "bench_shapes:measure", asked, tmp_path, device=device, layers=layers)
    for key, value in found.items():
        if isinstance(value, str | int | float):
            record_property(key, value)
    assert found["layers"] == layers and all(map(math.isfinite, found["seconds"]))
    if device == "gpu":
        judge(record_property, {"predicted over measured": (abs(found["predicted_over_measured"] - 1), MEMORY)})


@pytest.mark.gpus(8)
def test_the_layout_of_the_8b_recipe(device, ranks, tmp_path, record_property):
    """TP 2, sequence parallel, DP 4, with fewer layers; two ranks of toy widths on a CPU."""
    toy = device == "cpu"
    config = json.loads((RECIPE_8B.parent / "configs" / "Llama-3.1-8B" / "config.json").read_text())
    config |= bench_shapes.TOY | {"num_hidden_layers": 2} if toy else {"num_hidden_layers": LAYERS_8B}
    (tmp_path / "config.json").write_text(json.dumps(config))
    world = 2 if toy else 8
    overrides = [f"trainer.world_size={world}", "optimizer.warmup_steps=0", f"policy.path={tmp_path}"]
    overrides += ["trainer.micro_batch_tokens=256", "policy.dtype=float32"] if toy else []
    layers = "te" if not toy and importlib.util.find_spec("transformer_engine") else "plain"
    found = ranks(world, "gpu_ranks:layout_of_8b", overrides, device=device, layers=layers)
    losses = [answer["losses"] for answer in found]
    assert all(loss == losses[0] for loss in losses) and all(map(math.isfinite, losses[0]))
    recipe = load_recipe(RECIPE_8B, overrides)
    options = dict(layers=layers, device=device, sequence_tokens=recipe.micro_batch_tokens)
    predicted = predict_trainer(recipe, str(tmp_path), **options)
    rate = found[0]["tokens"] / max(answer["seconds"][-1] for answer in found)
    record_property("model TFLOP/s per rank", predicted.model_flops_per_token * rate / world / 1e12)
    fullest = max((answer["peak"] for answer in found), key=lambda peak: peak["total"])
    figures = bench_shapes.memory_figures(predicted, fullest)
    record_property("predicted over measured", figures["predicted_over_measured"])
    if not toy:
        judge(record_property, {"predicted over measured": (abs(figures["predicted_over_measured"] - 1), MEMORY)})
