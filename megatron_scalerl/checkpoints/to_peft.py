"""Converts the adapters of a run's checkpoint to a PEFT folder, or merges the adapters into the base policy."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_scalerl.checkpoints.assembly import HF_NAMES, Assembly, Origin, Part, Sources, band, cast, matrix_shape
from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.checkpoints.conversion import Copier, Options, result_folder
from megatron_scalerl.checkpoints.dist_reader import DistReader, stored_parameters
from megatron_scalerl.checkpoints.hf_folder import Shard, family_of_folder, open_folder
from megatron_scalerl.checkpoints.hf_writer import write_shard
from megatron_scalerl.checkpoints.to_hf import write_view
from megatron_scalerl.checkpoints.views import View, layout_of, sources
from megatron_scalerl.checkpoints.weight_map import folder_assembly, parameter_shape, tensor_assemblies
from megatron_scalerl.models.adapters import CONFIG, adapter_family, projections_of
from megatron_scalerl.models.family import Family, Piece
from megatron_scalerl.record import record

WEIGHTS = "adapter_model.safetensors"


@record
class Adapted:
    """The policy whose adapters a run trains. The fields are settings of policy or policy.lora in the recipe."""

    path: str
    dtype: str
    rank: int
    alpha: float
    targets: tuple[str, ...]


def to_peft(checkpoint: Path, out: Path, policy: Adapted) -> None:
    """Write the adapters as a PEFT folder. Raises ValueError as `to_hf.to_hf` does."""
    _, tensors, chunks = _adapters(checkpoint, family_of_folder(policy.path), policy)
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": policy.path,
        "r": policy.rank,
        "lora_alpha": policy.alpha,
        # Mixtral's experts have module names, such as w1, that are not among the targets.
        "target_modules": policy.targets if modules == {*policy.targets} else sorted(modules),
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    copier = Copier(sources=chunks, options=Options(), on_bytes=lambda nbytes: None)
    with result_folder(out, sum(tensor.nbytes for tensor in tensors.values())) as work:
        shard = Shard(file=WEIGHTS, metadata={"format": "pt"}, tensors=tuple(tensors))
        write_shard(work, shard, tensors, copier, ())
        write_durably(work / CONFIG, (json.dumps(config, indent=2) + "\n").encode())


def to_merged(checkpoint: Path, out: Path, policy: Adapted) -> None:
    """Write the policy, each adapted weight W replaced with W + alpha / rank B A. Raises ValueError as `to_hf.to_hf`
    does."""
    family = family_of_folder(policy.path)
    adapters, tensors, chunks = _adapters(checkpoint, family, policy)
    factors = {}
    for rule in adapters.rules:
        [name] = rule.hf_shapes
        factors[rule.megatron] = _values(tensors[name], chunks)
    pieces: dict[str, list[tuple[Piece, np.ndarray, np.ndarray]]] = {}
    for piece, projection, rows in _projections(family):
        if f"{projection}_A" in factors:
            b = factors[f"{projection}_B"][rows] * np.float32(policy.alpha / policy.rank)
            pieces.setdefault(piece.hf_name, []).append((piece, b, factors[f"{projection}_A"]))
    view = _base(policy, family)

    # `bands` asks for the whole merged tensor again for each band, so the last result is kept.
    @lru_cache(maxsize=1)
    def merged_bits(name: str) -> np.ndarray:
        weight = view.tensors[name]
        values = _values(weight, view.sources)
        for piece, b, a in pieces[name]:
            product = b @ a
            values[piece.hf_index] += product.T if piece.transposed else product
        return cast(values.view(np.uint32), "F32", weight.dtype)

    def bits(origin: Origin, name: str) -> np.ndarray:
        return merged_bits(name) if origin == "merged" else view.sources(origin, name)

    merged_tensors = {name: _merged_tensor(view.tensors[name]) for name in pieces}
    write_view(replace(view, sources=bits, tensors={**view.tensors, **merged_tensors}), out, Options())


def _adapters(checkpoint: Path, family: Family, policy: Adapted) -> tuple[Family, dict[str, Assembly], Sources]:
    """(Family of the adapters, PEFT's tensor name -> assembly of that tensor, function that reads the parts'
    elements)."""
    adapters = adapter_family(family, rank=policy.rank, targets=policy.targets)
    shapes = {rule.megatron: parameter_shape(rule) for rule in adapters.rules}
    stored = stored_parameters(checkpoint, adapters, shapes)
    tensors = tensor_assemblies(adapters, stored, None, str(checkpoint))
    return adapters, tensors, sources(None, DistReader(checkpoint, stored))


def _base(policy: Adapted, family: Family) -> View:
    """The view of the frozen weights to which the adapters belong, converted to policy.dtype."""
    path = Path(policy.path)
    dtype = HF_NAMES[policy.dtype]
    folder = open_folder(path)
    layout = layout_of(folder, family)
    tensors = {name: folder_assembly(folder, name, dtype) for name in folder.tensors}
    tensors |= {name: folder_assembly(folder, name) for name in layout.passthrough}
    return View(
        path=path,
        sources=sources(folder),
        tensors=tensors,
        layout=layout,
        side=path,
        generation=family.generation_config,
    )


def _projections(family: Family) -> Iterator[tuple[Piece, str, slice]]:
    """Yield (piece of an adapted weight, Megatron's name of the adapter without _A or _B, rows of B that change the
    piece)."""
    for rule in family.rules:
        linear, projections = projections_of(rule)
        if not projections:
            continue
        ends = Counter[str]()
        for number, piece in enumerate(rule.pieces(0, 1)):
            projection = projections[number % len(projections)]
            rows = slice(None)
            if piece.axis == 0:
                first = ends[projection]
                ends[projection] += piece.stop - piece.start
                rows = slice(first, ends[projection])
            yield piece, f"{linear}.lora.{projection}", rows


def _values(tensor: Assembly, chunks: Sources) -> np.ndarray:
    """The values of a tensor as float32 in the tensor's shape; a copy."""
    bits = cast(band(tensor, chunks, 0, tensor.rows), tensor.dtype, "F32")
    return bits.view(np.float32).reshape(tensor.shape).copy()


def _merged_tensor(tensor: Assembly) -> Assembly:
    """The tensor as an assembly of a single part, which comes from the merged weights."""
    height, width = matrix_shape(tensor.shape)
    part = Part(row=0, column=0, height=height, width=width, origin="merged", source=tensor.name, index=())
    return replace(tensor, source_dtype=tensor.dtype, parts=(part,))
