"""The fused Triton forward in the interpreter, against fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from triton_interpreter import bf16_as_on_a_gpu, interpret, truth

from megatron_scalerl.logits import fused_kernel, row_kernels
from megatron_scalerl.logits.fused_kernel import Tiles, fused_statistics
from megatron_scalerl.logits.projection import Projection, results

TILES = Tiles(tokens=16, columns=32, width=16, warps=4, stages=1, runs=2)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    interpret(monkeypatch, row_kernels, fused_kernel)
    monkeypatch.setattr(fused_kernel, "FEWEST_PROGRAMS", 1)
    monkeypatch.setattr(fused_kernel, "GROUP", 2)


def projection(tokens: int, vocab: int, width: int, dtype: torch.dtype = torch.float32) -> Projection:
    """Operands hold bf16 numbers in every dtype; targets lie on the edges of tiles, runs and the vocabulary."""
    generator = torch.Generator().manual_seed(tokens + vocab)
    hidden = torch.randn(tokens, width, generator=generator).bfloat16()
    weight = (0.5 * torch.randn(vocab, width, generator=generator)).bfloat16()
    edges = torch.tensor([0, 31, 32, 63, 64, 95, vocab - 1])
    targets = edges[edges < vocab].repeat(tokens)[:tokens]
    return Projection(
        hidden=hidden.to(dtype),
        weight=weight.to(dtype),
        targets=targets,
        scale=torch.linspace(0.5, 2.0, tokens),
        first=0,
        round_logits=False,
        entropy=True,
        entropy_grad=False,
        grad_logits="bf16",
        workspace_bytes=2**20,
    )


def logits(p: Projection) -> torch.Tensor:
    return p.hidden.double() @ p.weight.double().t() * p.scale.double()[:, None]


@pytest.mark.usefixtures("interpreted")
def test_nothing_beside_the_operands_is_read() -> None:
    """Operands that are views into matrices of nan: a hidden size of 33 in tiles of 16, 17 tokens, 65 columns."""
    p = projection(17, 65, 33)
    inner = []
    for matrix in (p.hidden, p.weight):
        outer = torch.full((matrix.shape[0] + 40, matrix.shape[1] + 20), torch.nan)
        outer[: matrix.shape[0], : matrix.shape[1]] = matrix
        inner.append(outer[: matrix.shape[0], : matrix.shape[1]])
    views = replace(p, hidden=inner[0], weight=inner[1])
    assert torch.equal(fused_statistics(views, TILES), fused_statistics(p, TILES))


@pytest.mark.usefixtures("interpreted")
def test_bf16_operands_are_multiplied_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bf16 (with the interpreter's dot mended) and as fp32 that holds the same numbers: the same bits."""
    bf16_as_on_a_gpu(monkeypatch)
    p = projection(20, 70, 33, torch.bfloat16)
    stats = fused_statistics(p, TILES)
    widened = replace(p, hidden=p.hidden.float(), weight=p.weight.float())
    assert torch.equal(stats, fused_statistics(widened, TILES))
    assert (results(stats)[1] - truth(logits(p), p.targets)[1]).abs().max() < 1e-5


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("level", [-1e4, -300.0, 300.0, 1e4])
def test_statistics_at_any_level(level: float) -> None:
    p = projection(17, 65, 16)
    p.hidden[:, 0], p.weight[:, 0] = 1.0, level
    p = replace(p, scale=torch.tensor(1.0))
    expected = truth(p.hidden.double() @ p.weight.double().t(), p.targets)
    for found, exact in zip(results(fused_statistics(p, TILES)), expected):
        assert (found.double() - exact).abs().max() < max(1e-5, abs(level) * 2**-21)


@pytest.mark.usefixtures("interpreted")
def test_equal_logits_count_one_by_one() -> None:
    p = projection(17, 65, 16)
    p.weight[:] = p.weight[0].clone()
    m, r, u, target = fused_statistics(p, TILES)
    assert (r == 64).all() and (u == 0).all() and torch.equal(m, target)


@pytest.mark.usefixtures("interpreted")
def test_entropy_is_left_out_unless_asked_for() -> None:
    p = replace(projection(17, 65, 16), entropy=False)
    with_entropy = fused_statistics(replace(p, entropy=True), TILES)
    without = fused_statistics(p, TILES)
    assert torch.equal(without[[0, 3]], with_entropy[[0, 3]]) and torch.allclose(without[1], with_entropy[1])
    assert with_entropy[2].max() < 0


@pytest.mark.usefixtures("interpreted")
def test_a_small_workspace_gets_fewer_runs() -> None:
    """[runs, 4, T] and its merging stay within the bytes; with many runs they would take 2 KiB here."""
    p, many = projection(16, 256, 16), replace(TILES, runs=8)
    found = fused_statistics(replace(p, workspace_bytes=1024), many)
    assert torch.equal(found, fused_statistics(p, TILES)) and not torch.equal(found, fused_statistics(p, many))
