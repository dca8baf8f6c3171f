"""Parameters of a small model's workers, and a loader like vLLM's for them."""

import torch

from megatron_scalerl.weights.live_map import needs, record_copies
from megatron_scalerl.weights.live_weights import BLOCK_ROWS, live_views
from megatron_scalerl.weights.plan import manifest_of

SHAPES = {
    "plain": (6,),
    "q": (8, 6),
    "k": (4, 6),
    "gate": (8, 6),
    "up": (8, 6),
    "down": (6, 8),
    "vocab": (10, 6),
    "experts": (4, 6, 10),
    "rotary": (8, 6),
    "scalar": (),
}


def live(tp=2):
    """Parameters of one worker of `tp`."""
    shapes = {
        "norm": (6,),
        "qkv": (12 // tp, 6),
        "gate_up": (16 // tp, 6),
        "down": (6, 8 // tp),
        "embedding": (16 // tp, 6),
        "w13": (4, 10 // tp, 6),
        "rotary": (8 // tp, 6),
        "scale": (1,),
    }
    return {name: torch.full(shape, -1.0) for name, shape in shapes.items()}


def loader(parameters, rank, tp=2):
    """What vLLM's loaders do, in small."""

    def cut(weight, axis):
        size = weight.shape[axis] // tp
        return weight.narrow(axis, rank * size, size)

    def load(weights):
        for name, weight in weights:
            if name == "plain":
                parameters["norm"].data.copy_(weight)
            elif name in ("q", "k"):
                part = cut(weight, 0)
                start = 0 if name == "q" else 8 // tp
                parameters["qkv"].data.narrow(0, start, part.shape[0]).copy_(part)
            elif name in ("gate", "up"):
                half = 8 // tp
                target = parameters["gate_up"].data[(name == "up") * half : (1 + (name == "up")) * half]
                target.copy_(cut(weight, 0).to(torch.float32))
            elif name == "down":
                parameters["down"].data.copy_(cut(weight, 1).contiguous())
            elif name == "vocab":
                rows = weight[rank * 16 // tp : (rank + 1) * 16 // tp]
                parameters["embedding"].data[: rows.shape[0]].copy_(rows)
            elif name == "experts":  # [experts, hidden, gate and up] in the checkpoint
                for half, part in enumerate(weight.transpose(-1, -2).chunk(2, dim=1)):
                    size = 5
                    if tp == 1:
                        parameters["w13"].data[:, half * size : (half + 1) * size].copy_(part)
                    elif half == rank:
                        for expert in range(part.shape[0]):
                            parameters["w13"].data[expert].copy_(part[expert])
            elif name == "rotary":
                heads = weight.view(2, 2, 2, 6).transpose(1, 2).reshape(8, 6)
                parameters["rotary"].data.copy_(cut(heads, 0))
            elif name == "scalar":
                parameters["scale"].data.view(()).copy_(weight)

    return load


def recorded(load, manifest, parameters, packed=frozenset()):
    """(views, needs) of parameters that `load` fills."""
    scatters = record_copies(load, manifest, parameters)
    return live_views(scatters, manifest, parameters, packed), needs(scatters, manifest)


def weights(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


MANIFEST = manifest_of((name, "float32", shape) for name, shape in SHAPES.items())


def in_blocks(plain):
    """As vLLM's CPU kernel holds experts [E, N, K]."""
    experts, rows, width = plain.shape
    blocks = plain.view(experts, rows // BLOCK_ROWS, BLOCK_ROWS, width).transpose(2, 3)
    return blocks.contiguous().view(experts, rows, width)


def experts(fused, dtype):
    """(manifest, load(tensors, parameter)) of gate and up of 3 experts, 40 rows each, in one parameter [3, 80, 6]: in
    blocks of rows, the first block of `up` begins in the middle."""
    shapes = {f"{e}.{kind}": (40, 6) for e in range(3) for kind in ("gate", "up")}
    if fused:
        shapes = {"gate_up": (3, 6, 80)}

    def load(given, into):
        for name, weight in given:
            if fused:
                into.data.copy_(weight.transpose(1, 2))
            else:
                expert, _, kind = name.partition(".")
                into.data[int(expert)].narrow(0, 40 * (kind == "up"), 40).copy_(weight)

    return manifest_of((name, dtype, shape) for name, shape in shapes.items()), load
