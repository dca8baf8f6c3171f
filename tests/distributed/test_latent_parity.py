"""Latent attention under every layout is transformers': log-probabilities, every gradient, and the weights' bits.

Why this matters: a narrow projection that ranks share, a rotary part of the keys that all heads share and a router
whose bias chooses and does not weigh each have a gradient that is wrong under one layout alone. Rows are packed here,
and sequence by sequence there. Not exercised: Transformer Engine's layers, NCCL.
"""

import pytest
import random_policies
import torch
from parity_layouts import CP2, EP2, EXPERTS, PLAIN, PP2, RECOMPUTED, SP, TP2, same_weights
from runner import run_ranks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def uneven(end, **model):
    """One of the four layers in the stage at this end."""
    return dict(model={f"num_layers_in_{end}_pipeline_stage": 1, **model})


KINDS = ("kimi", "deepseek", "moonlight")
ALONE = {kind: (kind, PLAIN) for kind in KINDS}
TWO_RANKS = {
    "kimi tp2": ("kimi", {**PLAIN, **TP2, **SP}),
    "kimi ep2": ("kimi", {**PLAIN, **EP2}),
    "kimi pp2": ("kimi", {**PLAIN, **PP2}),
    "kimi pp2 1+3, experts recomputed": ("kimi", {**PLAIN, **PP2, **uneven("first", **EXPERTS["model"])}),
    "kimi pp2 3+1, experts recomputed": ("kimi", {**PLAIN, **PP2, **uneven("last", **EXPERTS["model"])}),
    "kimi cp2": ("kimi", {**PLAIN, **CP2}),
    "deepseek tp2": ("deepseek", {**PLAIN, **TP2, **SP}),
    "deepseek ep2 recomputed": ("deepseek", {**PLAIN, **EP2, **RECOMPUTED}),
    "moonlight tp2": ("moonlight", {**PLAIN, **TP2, **SP}),
    "moonlight pp2 3+1": ("moonlight", {**PLAIN, **PP2, **uneven("last")}),
}
FOUR_RANKS = {
    "kimi tp2 ep2": ("kimi", {**PLAIN, **TP2, **SP, **EP2}),
    "kimi tp2 pp2 3+1": ("kimi", {**PLAIN, **TP2, **PP2, **uneven("last", **SP["model"])}),
    "deepseek tp2 ep2 etp1": ("deepseek", {**PLAIN, **TP2, **SP, **EP2, "expert_tensor_parallel_size": 1}),
}


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
            starts = row["cu_seqlens"].tolist()
            parts = [model(input_ids=row["tokens"][:, a:b]).logits[0] for a, b in zip(starts, starts[1:])]
            chosen = torch.cat(parts).log_softmax(-1).gather(1, row["targets"][:, None])[:, 0]
            (-(chosen * row["weights"]).sum()).backward()
            logprobs.append(chosen.detach())
        self[kind] = logprobs, dict(as_published(model))
        return self[kind]


def as_published(model):
    """Gradients by the names of published checkpoints, which have each expert apart."""
    for name, parameter in model.named_parameters():
        layer, fused, projection = name.partition("mlp.experts.")
        if not fused:
            yield name, parameter.grad
            continue
        for expert, grad in enumerate(parameter.grad):
            kinds = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
            for kind, part in zip(kinds, grad.chunk(len(kinds))):
                yield f"{layer}mlp.experts.{expert}.{kind}.weight", part


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    return Transformers(tmp_path_factory.mktemp("latent"))


def measured(world_size, layouts, theirs):
    jobs = [(name, str(theirs.root / kind), layout) for name, (kind, layout) in layouts.items() if theirs[kind]]
    return run_ranks(world_size, "parity_ranks:many", jobs)


@pytest.fixture(scope="module")
def alone(theirs):
    return measured(1, ALONE, theirs)


@pytest.fixture(scope="module")
def by_two(theirs):
    return measured(2, TWO_RANKS, theirs)


@pytest.fixture(scope="module")
def by_four(theirs):
    return measured(4, FOUR_RANKS, theirs)


def is_transformers(name, kind, ranks, theirs):
    """Log-probabilities to 2e-5, gradients to 1e-5 of their norm, the weights to the bit."""
    logprobs, grads = theirs[kind]
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
    same_weights(ranks[0][name], theirs.root / kind)


@pytest.mark.parametrize("kind", ALONE)
def test_one_rank_is_transformers(kind, alone, theirs):
    is_transformers(kind, kind, alone, theirs)


@pytest.mark.parametrize("name", TWO_RANKS)
def test_two_ranks_are_transformers(name, by_two, theirs):
    is_transformers(name, TWO_RANKS[name][0], by_two, theirs)


@pytest.mark.parametrize("name", FOUR_RANKS)
def test_four_ranks_are_transformers(name, by_four, theirs):
    is_transformers(name, FOUR_RANKS[name][0], by_four, theirs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_leaves_the_bias_of_routers_as_it_is(kind, alone):
    """And moves every other tensor."""
    found = alone[0][kind]
    biases = {name for name in found["weights"] if name.endswith("e_score_correction_bias")}
    assert len(biases) == 3
    for name, weight in found["weights"].items():
        assert torch.equal(found["stepped"][name], weight) == (name in biases), name
