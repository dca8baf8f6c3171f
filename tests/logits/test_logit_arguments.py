"""Every mistake in the projection's arguments is a ValueError with what was expected and what was found."""

import pytest
import torch
from logit_problems import problem

from megatron_scalerl.logits import choice, token_logprobs, token_loss


class Quantized(torch.Tensor):
    """A head whose numbers are not those that it shows, as quantization libraries make them."""


def with_target(place, target):
    return torch.zeros(7, dtype=torch.int64).index_fill(0, torch.tensor([place]), target)


H, W, Y = problem(dtype=torch.float32)
MISTAKES = {
    "width": (dict(weight=W[:, :2]), r"hidden is \[7, 5\] and weight \[11, 2\]"),
    "tokens": (dict(targets=Y[:6]), r"targets is \[6\]; .* \[7\]"),
    "type of targets": (dict(targets=Y.int()), "targets is torch.int32; .* int64"),
    "target above": (dict(targets=with_target(4, 11)), r"targets: id 11 at position 4 .* 11 ids .* 1 invalid ids"),
    "target with loss": (
        dict(targets=with_target(5, 99), places=torch.arange(4, 7)),
        "targets: id 99 at position 5 .* 11 ids",
    ),
    "vocabulary": (dict(vocab_size=12), r"vocab_size is 12; .* 1 to 11 \(11 rows on 1 ranks\)"),
    "places": (dict(places=torch.arange(3).int()), r"places is \[3\] in torch.int32"),
    "temperature": (dict(temperature=0.0), "temperature is 0.0; .* above 0"),
    "temperature below": (dict(temperature=-1.0), "temperature is -1.0; .* above 0"),
    "int8 head": (dict(weight=W.to(torch.int8)), "weight is torch.int8; .* quantized head has no exact logits"),
    "head of a subclass": (dict(weight=W.as_subclass(Quantized)), "weight is Quantized; .* a plain tensor"),
    "another type than hidden": (
        dict(weight=W.bfloat16()),
        "weight is torch.bfloat16 on cpu, .* hidden is torch.float32 on cpu",
    ),
    "logits": (dict(logits="bf16"), "logits is 'bf16'; .* fp32 or model"),
    "backend": (dict(backend="numpy"), "backend is 'numpy'; .* auto or cuda or torch"),
    "workspace": (dict(workspace_mb=0.0001), r"workspace_mb is 0.0001; .* 0\.001"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_mistake_is_named(mistake, in_chunks):
    changes, message = MISTAKES[mistake]
    arguments = dict(hidden=H, weight=W, targets=Y) | changes
    with pytest.raises(ValueError, match=message):
        if in_chunks:
            token_loss(loss=lambda lp, e, i: lp.sum(), **arguments)
        else:
            token_logprobs(**arguments)


def test_without_loss_a_target_may_be_anything():
    places = torch.tensor([0, 1, 3, 4, 5, 6])
    assert token_logprobs(H, W, with_target(2, -100), places=places)[0][2] == 0.0


def test_trusted_arguments_are_not_read():
    """On the meta device looking would be an error; shapes are still checked."""
    h, w, y = (x.to("meta") for x in (H, W, Y))
    for places in (None, torch.arange(3, device="meta")):
        found, _ = token_logprobs(h, w, y, places=places, temperature=0.7, trusted=True)
        assert found.shape == (7,)
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        token_logprobs(h, w, y)
    with pytest.raises(ValueError, match=r"targets is \[6\]; .* \[7\]"):
        token_logprobs(h, w, y[:6], trusted=True)


def test_cuda_on_a_cpu_requires_a_gpu():
    with pytest.raises(ValueError, match=r"cuda .* not torch\.float32 on cpu; choose the backend auto"):
        token_logprobs(H, W, Y, backend="cuda")


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_auto_is_torch_without_a_gpu(name):
    assert choice.choose_backend(name, torch.device("meta"), torch.float32).name == "torch"


def test_auto_is_cuda_on_a_gpu_for_the_types_that_it_multiplies():
    types = (torch.bfloat16, torch.float32, torch.float64)
    chosen = [choice.choose_backend("auto", torch.device("cuda"), dtype).name for dtype in types]
    assert chosen == ["cuda", "cuda", "torch"]
