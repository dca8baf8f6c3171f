"""Run folders of several recipes and seeds with known curves: synthetic, without a policy."""

from pathlib import Path

import numpy as np
from json_lines import append

from megatron_scalerl.fit.curve import Curve
from megatron_scalerl.fit.sigmoid import sigmoid


def curve_of(compute, pass_rate, *, initial=0.4, prompts=1000, generations=16, name="run"):
    """Points in memory, each of `generations` per prompt."""
    return Curve(
        name=name,
        source=Path(name),
        compute=np.asarray(compute),
        pass_rate=np.asarray(pass_rate),
        initial=initial,
        prompts=prompts,
        generations=np.full(len(compute), float(generations)),
    )


def write_run(folder, *, seed, recipe="", asymptote=0.8, exponent=2.0, midpoint=0.05, points=14, rng, prompts=400):
    """A run folder that measured the curve at `points` computes up to 0.2 with binomial noise, 8 generations each."""
    folder.mkdir(parents=True)
    compute = np.linspace(0.2 / points, 0.2, points)
    curve = sigmoid(compute, asymptote=asymptote, exponent=exponent, midpoint=midpoint, initial=0.38)
    measured = rng.binomial(prompts * 8, curve) / (prompts * 8)
    same = {"prompts": prompts, "generations": 8, "unit": "device_hours"}
    points = enumerate(zip([0.0, *compute], [0.38, *measured]))
    rows = [{**same, "step": 5 * n, "pass_rate": float(y), "compute": float(c)} for n, (c, y) in points]
    append(folder / "validation.jsonl", *rows)
    (folder / "recipe.yaml").write_text(
        f"name: {folder.name}\nseed: {seed}\nsteps: 70\npolicy: {{path: p}}\nprompts: {{path: q}}\n{recipe}\n"
    )
    return folder
