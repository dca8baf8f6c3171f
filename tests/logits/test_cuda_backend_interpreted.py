"""The GPU backend on CPU tensors: its Triton kernels interpreted, its GEMMs in fp32 on cast blocks.

Everything of it runs here but `torch.mm(out_dtype=)`, `torch.addmm(out_dtype=)` and the device itself.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from logit_problems import IN_FP32_AND_BF16, LiveBytes, by_log_softmax, relative
from triton_interpreter import bf16_as_on_a_gpu, interpret

from megatron_scalerl.logits import cuda_backend, row_kernels, token_logprobs
from megatron_scalerl.logits.api import token_loss
from megatron_scalerl.logits.cuda_backend import CudaBackend, gradient_block, statistics_block
from megatron_scalerl.logits.projection import Projection, TokenGradients, merged_statistics, results

TOKENS, WIDTH, VOCAB = 21, 24, 150
TIGHT, ROOMY = 12_000, 2**20
"""Bytes of workspace: blocks of 8 to 24 tokens by 16 to 80 columns; one block."""


@pytest.fixture
def interpreted(monkeypatch):
    interpret(monkeypatch, row_kernels)
    bf16_as_on_a_gpu(monkeypatch)
    small = {"TOKEN_STEP": 8, "COLUMN_STEP": 16, "FEWEST_TOKENS": 16, "FEWEST_COLUMNS": 32, "CHUNK_COLUMNS": 64}
    for name, value in {**small, "FEWEST_CHUNK_TOKENS": 8}.items():
        monkeypatch.setattr(cuda_backend, name, value)


in_the_interpreter = pytest.mark.usefixtures("interpreted")


def problem(dtype, seed=0):
    """hidden, weight and targets; the targets lie on edges of blocks and of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator).to(dtype)
    weight = (0.4 * torch.randn(VOCAB, WIDTH, generator=generator)).to(dtype)
    targets = torch.tensor([0, 15, 16, 31, 32, 47, 63, 64, 79, 80, 127, 128, VOCAB - 1]).repeat(2)[:TOKENS]
    return hidden, weight, targets


def truth(hidden, weight, targets, temperature=1.0):
    """Log-probabilities and entropies in fp64, with their gradients' leaves."""
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    return *by_log_softmax(h, w, targets, temperature), h, w


def weighted(logprob, entropy):
    g = torch.linspace(-1.0, 2.0, TOKENS).to(logprob.dtype)
    return (logprob * g).sum() + (entropy * g.flip(0)).sum()


def weighted_chunk(logprob, entropy, places):
    """The terms of `weighted` that belong to some of the tokens."""
    g = torch.linspace(-1.0, 2.0, TOKENS)
    return (logprob * g[places]).sum() + (entropy * g.flip(0)[places]).sum()


def both_passes(dtype, *, main_grad=None, workspace=TIGHT, **options):
    """Log-probabilities, entropies, and the gradients of `weighted`: of hidden, and of the head where it goes."""
    hidden, weight, targets = problem(dtype)
    hidden.requires_grad_(), weight.requires_grad_()
    if main_grad is not None:
        weight.main_grad, weight.grad_added_to_main_grad = main_grad, False
    options = {"backend": "cuda", "entropy": "grad", "workspace_mb": workspace / 2**20, **options}
    pair = token_logprobs(hidden, weight, targets % options.get("vocab_size", VOCAB), **options)
    weighted(*pair).backward()
    return *(x.detach() for x in pair), hidden.grad, weight.grad if main_grad is None else main_grad


@in_the_interpreter
@pytest.mark.parametrize("workspace", [TIGHT, ROOMY])
@pytest.mark.parametrize("mode, bound", [("bf16", 3e-3), ("bf16x2", 1e-5), ("fp32", 1e-6)])
def test_bf16_head_against_fp64(workspace, mode, bound):
    """Values within 1e-5 nats; the head's gradient, in an fp32 main_grad, within the bound of its kind."""
    options = dict(grad_logits=mode, workspace=workspace, temperature=0.7)
    logprob, entropy, of_hidden, of_head = both_passes(torch.bfloat16, main_grad=torch.zeros(VOCAB, WIDTH), **options)
    exact = truth(*problem(torch.bfloat16), 0.7)
    weighted(*exact[:2]).backward()
    assert (logprob - exact[0]).abs().max() < 1e-5 and (entropy - exact[1]).abs().max() < 1e-5
    assert relative(of_head, exact[3].grad) < bound
    assert relative(of_hidden, exact[2].grad) < 4e-3  # rounded to bf16 at the end


SOME = torch.tensor([n for n in range(TOKENS) if n % 3])
"""Places of tokens with loss."""


def assert_same(found, expected, bound):
    assert all((a - b).abs().max() < 1e-5 for a, b in zip(found[:2], expected[:2]))
    assert all(relative(a, b.double()) < bound for a, b in zip(found[2:], expected[2:]))


@in_the_interpreter
@pytest.mark.parametrize("logits", ["fp32", "model"])
@IN_FP32_AND_BF16
def test_equals_the_torch_backend(logits, dtype):
    """Also with a padded vocabulary, tokens without loss and a tight workspace."""
    options = dict(vocab_size=VOCAB - 20, places=SOME, temperature=0.7, logits=logits)
    found, expected = (both_passes(dtype, backend=name, **options) for name in ("cuda", "torch"))
    for logprob, _, _, of_head in (found, expected):
        assert of_head[VOCAB - 20 :].abs().max() == 0 and logprob[::3].abs().max() == 0
    assert_same(found, expected, 1e-6 if dtype == torch.float32 else 6e-3)


@in_the_interpreter
@pytest.mark.parametrize("mode", ["bf16", "bf16x2", "fp32"])
def test_kept_logits_give_the_gradients_of_recomputed_ones(mode, monkeypatch):
    """Into bf16 gradients, of a padded vocabulary with tokens without loss; recomputing them is not called."""
    options = dict(vocab_size=VOCAB - 20, places=SOME, grad_logits=mode, workspace=512 * 2**20)
    recomputed = both_passes(torch.bfloat16, **options)
    monkeypatch.delattr(CudaBackend, "gradients")
    assert_same(both_passes(torch.bfloat16, keep_logits=True, **options), recomputed, 6e-3)


@in_the_interpreter
@pytest.mark.parametrize("main_grad", [True, False])
def test_a_narrow_gradient_is_rounded_once(main_grad):
    """Blocks are summed in fp32 beside a bf16 gradient and added to what it holds: 1/2 + sum, to bf16."""
    held = 0.5 if main_grad else 0.0
    exact, into = (torch.full((VOCAB, WIDTH), held, dtype=dtype) for dtype in (torch.float32, torch.bfloat16))
    both_passes(torch.bfloat16, main_grad=exact, grad_logits="bf16x2")
    *_, narrow = both_passes(torch.bfloat16, main_grad=into if main_grad else None, grad_logits="bf16x2")
    assert torch.equal(narrow, exact.bfloat16()) and (exact - held).abs().max() > 0.1


@in_the_interpreter
@pytest.mark.parametrize("workspace", [10_000, ROOMY])
@pytest.mark.parametrize("logits", ["fp32", "model"])
def test_a_bf16_head_inside_the_chunk_against_fp64(workspace, logits, monkeypatch):
    """A shard's padding, a token without loss and a temperature, in three chunks and in one."""
    hidden, weight, targets = problem(torch.bfloat16)
    hidden.requires_grad_(), weight.requires_grad_()
    temperature, mask = 0.7, torch.arange(TOKENS) != 5
    chunks = []
    products = []
    multiply = cuda_backend.add_product
    monkeypatch.setattr(cuda_backend, "add_product", lambda *given: (products.append(1), multiply(*given)))

    def of_chunk(logprob, entropy, places):
        chunks.append(len(places))
        return weighted_chunk(logprob, entropy, places)

    options = dict(entropy="grad", vocab_size=VOCAB - 20, temperature=temperature)
    options |= dict(workspace_mb=workspace / 2**20, logits=logits, backend="cuda", places=mask.nonzero()[:, 0])
    loss, *pair = token_loss(hidden, weight, targets % 130, of_chunk, **options)
    loss.backward()
    exact = truth(hidden, weight[:130], targets % 130, temperature)
    total = weighted(exact[0] * mask, exact[1] * mask)
    total.backward()
    bound = 1e-5 if logits == "fp32" else 0.05
    assert all((found - true * mask).abs().max() < bound for found, true in zip(pair, exact[:2]))
    assert relative(weight.grad[:130], exact[3].grad) < (6e-3 if logits == "fp32" else 0.02)
    assert relative(hidden.grad, exact[2].grad) < (6e-3 if logits == "fp32" else 0.02)
    assert chunks == [TOKENS - 1] if workspace == ROOMY else len(chunks) > 1
    assert len(products) == 2 * len(chunks) * 3


@in_the_interpreter
@pytest.mark.parametrize("fewest", [8, 9])
def test_a_thin_chunk_computes_the_logits_twice(fewest, monkeypatch):
    """Where chunks of 8 tokens fit and fewer than 9 are thin; all tokens of a short row are never too few."""
    monkeypatch.setattr(cuda_backend, "FEWEST_CHUNK_TOKENS", fewest)
    hidden, weight, targets = problem(torch.float32)
    p = projection_of(hidden, weight, targets, workspace_bytes=6_500)
    assert CudaBackend().chunk_tokens(p) == (8 if fewest == 8 else 0)
    assert CudaBackend().chunk_tokens(p.of_tokens(slice(0, 5))) == 5
    monkeypatch.delattr(CudaBackend, "gradients" if fewest == 8 else "chunk_gradients")
    options = dict(workspace_mb=6_500 / 2**20, backend="cuda", entropy="grad")
    token_loss(hidden.requires_grad_(), weight, targets, weighted_chunk, **options)[0].backward()
    exact = truth(hidden, weight, targets)
    weighted(*exact[:2]).backward()
    assert relative(hidden.grad, exact[2].grad) < 1e-6


@pytest.mark.parametrize("workspace_mb", [512, 2048])
@pytest.mark.parametrize("mode", ["bf16", "bf16x2", "fp32"])
def test_a_chunk_fits_the_workspace(mode, workspace_mb):
    """Logits and what is made of them; a chunk is not thinner than 1,024 tokens."""
    p = shape_of(16_384, 128_256, 4096, grad_logits=mode, workspace_bytes=workspace_mb * 2**20)
    tokens, apart = CudaBackend().chunk_tokens(p), {"bf16": 2, "bf16x2": 4, "fp32": 0}[mode]
    columns = 8192
    assert tokens >= 1024 or (tokens == 0 and workspace_mb == 512)
    cast = 4 * 4096 * (tokens + columns) * (mode == "fp32")
    assert tokens * (4 * 128_256 + columns * apart) + cast <= p.workspace_bytes
    assert not tokens or tokens % 128 == 0


@in_the_interpreter
def test_two_shards_give_what_one_does():
    """Tensor parallelism of 2 by hand: merged statistics, and the shards' gradients of hidden summed."""
    hidden, weight, targets = problem(torch.float32)
    whole = projection_of(hidden, weight, targets)
    shards = [replace(whole, weight=weight[:70]), replace(whole, weight=weight[70:], first=70)]
    outcome = []
    for parts in ([whole], shards):
        lse, logprob, entropy = results(merged_statistics(torch.stack([CudaBackend().statistics(p) for p in parts])))
        g = torch.linspace(-1.0, 2.0, TOKENS)
        given = TokenGradients(lse=lse, logprob=logprob, entropy=entropy, grad_logprob=g, grad_entropy=g.flip(0))
        grad_hidden, grad_weight = torch.zeros_like(hidden), torch.zeros_like(weight)
        for p in parts:
            CudaBackend().gradients(p, given, grad_hidden, grad_weight[p.first : p.first + p.count])
        outcome.append((logprob, entropy, grad_hidden, grad_weight))
    for one, two in zip(*outcome):
        assert (one - two).abs().max() < 2e-6 * max(1.0, one.abs().max().item())


def projection_of(hidden, weight, targets, **changes):
    options = dict(
        scale=torch.tensor(1.0),
        first=0,
        round_logits=False,
        entropy=True,
        entropy_grad=True,
        grad_logits="bf16" if hidden.dtype == torch.bfloat16 else "fp32",
        workspace_bytes=TIGHT,
    )
    return Projection(hidden=hidden, weight=weight, targets=targets, **{**options, **changes})


def shape_of(tokens, columns, width, **changes):
    """A projection of this size, without its memory."""
    hidden, weight = (torch.empty(1, width, dtype=torch.bfloat16).expand(rows, -1) for rows in (tokens, columns))
    return projection_of(hidden, weight, torch.empty(0), **changes)


@in_the_interpreter
def test_the_workspace_is_honoured():
    """fp32 operands (no casts): beside results and numbers per token nothing exceeds it, a quarter of all logits."""
    hidden, weight, targets = problem(torch.float32)
    budget, per_token = 3_000, 4 * len(targets)
    p = projection_of(hidden, weight, targets, workspace_bytes=budget)
    chosen = CudaBackend()
    assert chosen.workspace(p) <= budget < 4 * hidden.shape[0] * weight.shape[0] / 4
    with LiveBytes() as live:
        lse, logprob, entropy = results(chosen.statistics(p))
    assert live.peak < budget + 16 * per_token
    given = TokenGradients(lse=lse, logprob=logprob, entropy=entropy, grad_logprob=-logprob, grad_entropy=entropy)
    sums = torch.zeros_like(hidden), torch.zeros_like(weight)
    with LiveBytes() as live:
        chosen.gradients(p, given, *sums)
    assert 0.5 * budget < live.peak < budget + 8 * per_token


@settings(max_examples=300, deadline=None)
@given(
    tokens=st.integers(1, 40_000),
    columns=st.integers(1, 260_000),
    width=st.sampled_from([64, 1024, 8192]),
    mode=st.sampled_from(["bf16", "bf16x2", "fp32"]),
    rounded=st.booleans(),
    room=st.floats(0.0, 12.0),
)
def test_blocks_fit_into_every_workspace(tokens, columns, width, mode, rounded, room):
    """From the smallest workspace that is allowed to 2^12 times it; whole rows or whole columns where they fit."""
    p = shape_of(tokens, columns, width, grad_logits=mode, round_logits=rounded)
    p = replace(p, workspace_bytes=int(CudaBackend().workspace(p) * 2**room))
    element = 6 if rounded else 4
    rows, cols = statistics_block(p)
    assert 1 <= rows <= tokens and 1 <= cols <= columns and rows * cols * element <= p.workspace_bytes
    assert cols == columns or rows <= cuda_backend.FEWEST_TOKENS
    rows, cols = gradient_block(p)
    apart = {"bf16": 2, "bf16x2": 4, "fp32": 0}[mode]
    beside = 4 * width * (rows + cols) * (mode == "fp32")
    assert 1 <= rows <= tokens and 1 <= cols <= columns and (rows == tokens or cols <= cuda_backend.FEWEST_COLUMNS)
    assert rows * cols * (element + apart) + beside <= p.workspace_bytes
    for size, whole, step in ((rows, tokens, 128), (cols, columns, 256)):
        assert size == whole or size % step == 0 or size < step


@pytest.mark.slow
@in_the_interpreter
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_shape_against_fp64(data):
    """Tokens, columns and hidden sizes that no block divides, shards that start anywhere, a workspace of any size."""
    tokens, columns, width = (data.draw(st.integers(1, most)) for most in (20, 90, 20))
    first, room = data.draw(st.integers(0, 100)), data.draw(st.floats(0.0, 6.0))
    generator = torch.Generator().manual_seed(tokens * columns)
    hidden, weight = (torch.randn(rows, width, generator=generator) for rows in (tokens, columns))
    targets = torch.randint(0, columns, (tokens,), generator=generator)
    p = projection_of(hidden, weight, targets + first, first=first)
    chosen = CudaBackend()
    p = replace(p, workspace_bytes=int(chosen.workspace(p) * 2**room))
    lse, logprob, entropy = results(chosen.statistics(p))
    one = torch.ones(tokens)
    exact = truth(hidden, weight, targets)
    assert (logprob - exact[0]).abs().max() < 1e-5 and (entropy - exact[1]).abs().max() < 1e-5
    grads = torch.zeros_like(hidden), torch.zeros_like(weight)
    given = TokenGradients(lse=lse, logprob=logprob, entropy=entropy, grad_logprob=one, grad_entropy=-2 * one)
    chosen.gradients(p, given, *grads)
    (exact[0].sum() - 2 * exact[1].sum()).backward()
    for found, leaf in zip(grads, exact[2:]):
        assert (found - leaf.grad).abs().max() < 1e-5 * max(1.0, leaf.grad.abs().max().item())


@in_the_interpreter
def test_fp64_is_left_to_the_torch_backend():
    hidden, weight, targets = problem(torch.float64)
    with pytest.raises(ValueError, match=r"bfloat16 or float32 on a CUDA GPU, not torch\.float64 on cpu"):
        token_logprobs(hidden, weight, targets, backend="cuda")
