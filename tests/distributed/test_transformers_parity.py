"""Families under their layouts are transformers': log-probabilities, every gradient, and the weights' bits.

Why this matters: a narrow projection that ranks share, a rotary part of the keys that all heads share and a router
whose bias chooses and does not weigh each have a gradient that is wrong under one layout alone. Rows are packed here,
and sequence by sequence there. Not exercised: Transformer Engine's layers, NCCL.
"""

import pytest
import random_policies
import torch
from chosen import Worlds
from family_configs import experts_apart
from layouts import gradients_whole, grid, kind_of, same_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


KINDS = ("kimi", "deepseek", "moonlight", "flash", "glm4_moe", "dots1")
"""Policies with three layers of experts whose routers have a bias."""
OTHERS = ("smollm3", "seed_oss", "ernie4_5", "exaone4", "minimax_m2", "mixtral", "olmoe")
ROWS = {
    1: KINDS + OTHERS,
    2: grid(
        """
        kimi tp2 sp, kimi ep2, kimi pp2, kimi pp2 1+3 experts, kimi pp2 3+1 experts, kimi cp2,
        deepseek tp2 sp, deepseek ep2 recomputed, moonlight tp2 sp, moonlight pp2 3+1,
        smollm3 tp2, smollm3 pp2, smollm3 cp2, seed_oss tp2 sp, seed_oss pp2, ernie4_5 tp2 sp, ernie4_5 pp2,
        ernie4_5 cp2, exaone4 tp2 sp, exaone4 pp2, flash tp2 sp, flash ep2, flash pp2, flash cp2,
        glm4_moe tp2 sp, glm4_moe ep2, glm4_moe pp2, glm4_moe cp2, minimax_m2 tp2 sp, minimax_m2 ep2,
        minimax_m2 pp2, minimax_m2 cp2, mixtral tp2 sp, mixtral ep2, mixtral pp2, olmoe tp2 sp, olmoe ep2,
        olmoe pp2, dots1 tp2 sp, dots1 ep2, dots1 pp2
        """
    ),
    4: grid("kimi tp2 sp ep2, kimi tp2 pp2 3+1 sp, deepseek tp2 sp ep2 etp1"),
}
"""World size -> rows."""


class Transformers(dict):
    """Kind -> (log-probabilities [rows][N], gradients by the checkpoint's names); saves the policies."""

    def __init__(self, root):
        super().__init__()
        self.root = root

    def __missing__(self, kind):
        # without padding, or transformers leaves out the gradient of its token
        model = random_policies.make(kind, self.root / kind, pad_token_id=None)
        logprobs = []
        for row in random_policies.rows():
            chosen = random_policies.of_targets(random_policies.row_logits(model, row), row["targets"])
            (-(chosen * row["weights"]).sum()).backward()
            logprobs.append(chosen.detach())
        grads = ((name, parameter.grad) for name, parameter in model.named_parameters())
        self[kind] = logprobs, dict(experts_apart(model.config.model_type, grads))
        return self[kind]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return Transformers(tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module")
def measured(theirs):
    def jobs(size):
        chosen = [row for row in ROWS[size] if theirs[kind_of(row)]]
        return [(row, str(theirs.root / kind_of(row)), gradients_whole(row)) for row in chosen]

    return Worlds("parity_ranks:many", jobs)


@pytest.mark.parametrize("world_size, name", [(size, row) for size, of_size in ROWS.items() for row in of_size])
def test_every_layout_is_transformers(world_size, name, measured, theirs):
    """Log-probabilities to 2e-5, gradients to 1e-5 of their norm, the weights to the bit."""
    logprobs, grads = theirs[kind_of(name)]
    ranks = measured[world_size]
    errors = []
    for rank in ranks:
        found = rank[name]["logprobs"]
        if found is None:  # not of the last stage
            continue
        whole = [torch.cat(logprobs), *logprobs]
        expected = next(row for row in whole if len(row) == found.shape[1] and (row - found[0]).abs().max() < 1e-2)
        errors.append(float((found[0] - expected).abs().max()))
    ours = ranks[0][name]["grads"]
    assert all(grad.norm() > 0 for grad in grads.values())
    apart = {tensor: float((ours[tensor] - grad).norm() / grad.norm()) for tensor, grad in grads.items()}
    worst = max(apart, key=apart.__getitem__)
    print(f"{name}: log-probabilities {max(errors):.1e}, gradients {apart[worst]:.1e} ({worst})")
    assert max(errors) <= 2e-5 and apart[worst] <= 1e-5
    same_weights(ranks[0][name], theirs.root / kind_of(name))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_leaves_the_bias_of_routers_as_it_is(kind, measured):
    """And moves every other tensor."""
    found = measured[1][0][kind]
    biases = {name for name in found["weights"] if name.endswith("e_score_correction_bias")}
    assert len(biases) == 3
    for name, weight in found["weights"].items():
        assert torch.equal(found["stepped"][name], weight) == (name in biases), name
