"""A model family: Megatron options, rotary frequencies, and one weight map for both directions.

A `Rule` maps one Megatron parameter to Hugging Face tensors by rectangular pieces. Loading copies each piece from the
checkpoint into this rank's shard, saving copies it back: the same table, so Hugging Face -> Megatron -> Hugging Face
is exact. Megatron parameters have the names of Megatron's plain layers, with global layer and expert numbers;
`checkpoints.hf_folder` has Transformer Engine's other names.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import TYPE_CHECKING, Any, Literal

from megatron_scalerl.record import record

if TYPE_CHECKING:
    import torch

Index = int | slice
QkNorm = Literal["none", "weightless", "weighted", "all_heads"]
"""RMS norm of queries and keys before RoPE: of each head, Llama 4's without weights and Qwen3's with, or one of all
heads together, with a weight for each of their elements (OLMo 2)."""


@record
class Piece:
    """A rectangle of one Hugging Face tensor and its position in one rank's shard of a Megatron parameter."""

    hf_name: str
    hf_index: tuple[Index, ...]
    """Selects the rectangle; an int drops that dimension (one expert of a fused tensor)."""
    axis: int
    start: int
    stop: int
    """shard.narrow(axis, start, stop - start) is the rectangle."""
    transposed: bool = False
    """True if Hugging Face stores [in, out]."""

    def of_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """The piece's view of the shard, in Hugging Face orientation."""
        view = shard.narrow(self.axis, self.start, self.stop - self.start)
        if self.transposed:
            return view.t()
        return view


@record
class Rule:
    """A Megatron parameter and the Hugging Face tensors that it consists of."""

    megatron: str
    """Parameter name, for example decoder.layers.3.self_attention.linear_qkv.weight."""
    hf_shapes: Mapping[str, tuple[int, ...]]
    """Hugging Face name -> full shape."""
    pieces: Callable[[int, int], tuple[Piece, ...]]
    """(rank, size) of the parameter's tensor-parallel group -> pieces of that rank's shard."""
    place: Literal["first", "layer", "last"]
    """Pipeline stage that has the parameter: that of the embedding, of `layer`, or of the head."""
    layer: int = 0
    """Layer from 0, if place is "layer"."""
    expert: int | None = None
    """Expert from 0 for an expert's own weight, which the expert-parallel groups shard."""
    sharded: bool = True
    """False if every tensor-parallel rank has the whole parameter."""
    exported: bool = True
    """False for the head's copy of tied embeddings."""
    frozen: bool = False
    """True for the bias of a router: a buffer in fp32 that no optimizer steps; engines and exports have it too."""


@record
class LayerStyle:
    """The features of one layer."""

    moe: bool = False
    rope: bool = True
    qk_norm: QkNorm = "none"
    post_norm: bool = False
    """RMS norms of the results of attention and MLP, not of their inputs."""
    chunked: bool = False
    """Attention inside chunks of `Family.attention_chunk_size` tokens."""


@record
class Family:
    """A policy's architecture in Megatron's terms. Produced by `models.family`."""

    name: str
    transformer: Mapping[str, Any]
    """Fields of TransformerConfig."""
    gpt: Mapping[str, Any]
    """Keywords of GPTModel: max_sequence_length, share_embeddings_and_output_weights, rotary_base."""
    vocab_size: int
    """Number of tokens, without padding."""
    inv_freq: torch.Tensor
    """[d/2] fp32 rotary frequencies, scaling applied."""
    layers: tuple[LayerStyle, ...]
    rules: tuple[Rule, ...]
    """Rules in the order of the layers: embedding, layers, final norm, head."""
    attention_chunk_size: int | None = None
    passthrough: tuple[str, ...] = ()
    """Prefixes of tensors outside the policy (a vision tower, layers of multi-token prediction) that an export copies
    from the source folder."""
    query_scale: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None)
    """[N] positions -> [N] factor on the queries of layers without RoPE."""
    output_bias: bool = False
    """True if the attention's output projection has a bias; `add_qkv_bias` of `transformer` is that of the others."""
    untrained: int = 0
    """Parameters of the checkpoint's layers of multi-token prediction, which are outside the policy."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of generation_config.json with which an engine computes the same as the trainer."""

    @property
    def frozen(self) -> frozenset[str]:
        """Hugging Face's names of tensors that keep their type: those of `Rule.frozen`."""
        return frozenset(name for rule in self.rules if rule.frozen for name in rule.hf_shapes)


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """Smallest multiple of the tensor-parallel size that is not below the vocabulary size."""
    return -(-vocab_size // tp_size) * tp_size


def divided(total: int, parts: int, what: str) -> int:
    """total / parts. Raises ValueError, naming `what`, if a remainder is left."""
    if total % parts:
        raise ValueError(f"{what}: {total} is not a multiple of the parallel size {parts}")
    return total // parts


def require(config: Any, key: str, *allowed: Any) -> None:
    """Raises ValueError unless the Hugging Face config's `key` is one of `allowed` (or absent)."""
    value = getattr(config, key, allowed[0])
    if value not in allowed:
        raise ValueError(f"config.json: {key}: {value!r} is not supported, only {' or '.join(map(repr, allowed))}")


def require_present(config: Any, key: str, value: Any) -> None:
    """Raises ValueError unless the Hugging Face config has the `key`, which engines read, with this value."""
    if getattr(config, key, None) != value:
        raise ValueError(f"config.json: {key}: it has to be {value!r}")


def check_layout(family: Family, *, tp_size: int = 1, ep_size: int = 1, etp_size: int = 1) -> None:
    """Raises ValueError for a parallel size that does not divide the heads, key-value heads, MLPs or experts."""
    options = family.transformer
    experts = options.get("num_moe_experts") or 0
    if ep_size > 1 and not experts:
        raise ValueError(
            f"megatron.parallel.expert_model_parallel_size: {ep_size} ranks cannot divide a policy without experts; "
            "leave it at 1"
        )
    # Every size divides 0: a policy without experts passes.
    sharded = [
        ("tensor_model", tp_size, "attention heads", options["num_attention_heads"]),
        ("tensor_model", tp_size, "key-value heads", options["num_query_groups"]),
        ("expert_model", ep_size, "experts", experts),
        ("expert_tensor", etp_size, "expert MLP columns", options.get("moe_ffn_hidden_size") or 0),
        ("tensor_model", tp_size, "shared expert columns", options.get("moe_shared_expert_intermediate_size") or 0),
    ]
    if not all(style.moe for style in family.layers):
        sharded.append(("tensor_model", tp_size, "MLP columns", options["ffn_hidden_size"]))
    for kind, size, what, total in sharded:
        if total % size:
            key = f"megatron.parallel.{kind}_parallel_size"
            raise ValueError(f"{key}: {total} {what} cannot be divided by {size}")
