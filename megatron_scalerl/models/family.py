"""A model family: Megatron options, rotary frequencies, and one weight map for both directions.

A `Rule` maps one Megatron parameter to Hugging Face tensors by rectangular pieces. Loading copies each piece from the
checkpoint into this rank's shard, and an export copies the piece back by the same rule, so Hugging Face -> Megatron
-> Hugging Face is exact. Megatron parameters have the names of Megatron's plain layers, with global numbers of layers
and experts. `checkpoints.hf_folder` knows the different names in Transformer Engine's layers.
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
"""RMS norm of queries and keys before RoPE.

"weightless": of each head, without weights (Llama 4). "weighted": of each head, with weights (Qwen3). "all_heads":
over all heads together, with a weight for each element of all heads (OLMo 2).
"""


@record
class Piece:
    """A rectangle of a Hugging Face tensor, and its position in one rank's shard of a Megatron parameter."""

    hf_name: str
    hf_index: tuple[Index, ...]
    """Index that selects the rectangle. An int selects one expert of a fused tensor, and drops the dimension."""
    axis: int
    start: int
    stop: int
    """End of the rectangle in the shard, which is shard.narrow(axis, start, stop - start)."""
    transposed: bool = False
    """True if the Hugging Face tensor is stored as [in, out]."""

    def of_shard(self, shard: torch.Tensor) -> torch.Tensor:
        """The view of this piece in a shard, oriented as in the Hugging Face tensor."""
        view = shard.narrow(self.axis, self.start, self.stop - self.start)
        if self.transposed:
            return view.t()
        return view


@record
class Rule:
    """A Megatron parameter and the Hugging Face tensors that it consists of."""

    megatron: str
    """Name of Megatron's parameter, for example decoder.layers.3.self_attention.linear_qkv.weight."""
    hf_shapes: Mapping[str, tuple[int, ...]]
    """Full shape of each Hugging Face tensor, by name."""
    pieces: Callable[[int, int], tuple[Piece, ...]]
    """Function from (rank, size) in the parameter's tensor-parallel group to the pieces of the rank's shard."""
    place: Literal["first", "layer", "last"]
    """Pipeline stage that has the parameter: the stage of the embedding, of `layer`, or of the head."""
    layer: int = 0
    """Number of the layer, counted from 0, if `place` is "layer"."""
    expert: int | None = None
    """Number of the expert, counted from 0; None for other weights. Expert-parallel groups shard experts' weights."""
    sharded: bool = True
    """False if every tensor-parallel rank has the whole parameter."""
    exported: bool = True
    """False if an export leaves the parameter out, as for the head's copy of tied embeddings."""
    frozen: bool = False
    """True for the bias of a router: an fp32 buffer that no optimizer changes, but that engines and exports get."""


@record
class LayerStyle:
    """The kind of a decoder layer: experts or MLP, RoPE, norms, and attention, which may differ from layer to
    layer."""

    moe: bool = False
    rope: bool = True
    qk_norm: QkNorm = "none"
    post_norm: bool = False
    """True if RMS norms follow attention and MLP, instead of coming before them."""
    chunked: bool = False
    """True if tokens attend only inside chunks of `Family.attention_chunk_size` tokens."""


@record
class Family:
    """A policy's architecture in Megatron's terms. Produced by `models.family`."""

    name: str
    transformer: Mapping[str, Any]
    """Fields of TransformerConfig that the architecture sets."""
    gpt: Mapping[str, Any]
    """Keywords of GPTModel: max_sequence_length, share_embeddings_and_output_weights, rotary_base."""
    vocab_size: int
    """Number of tokens of the vocabulary, without padding."""
    inv_freq: torch.Tensor
    """[d/2] fp32 rotary frequencies, with the scaling applied."""
    layers: tuple[LayerStyle, ...]
    rules: tuple[Rule, ...]
    """The weight map, in the order embedding, layers, final norm, head."""
    attention_chunk_size: int | None = None
    passthrough: tuple[str, ...] = ()
    """Prefixes of tensors outside the policy, such as a vision tower or layers of multi-token prediction. An export
    copies these tensors from the source folder."""
    query_scale: Callable[[torch.Tensor], torch.Tensor] | None = field(default=None)
    """Function from positions [N] to the factors [N] that multiply the queries of layers without RoPE; None: no
    factors."""
    output_bias: bool = False
    """True if the attention's output projection has a bias. For queries, keys and values `transformer` has
    `add_qkv_bias`."""
    untrained: int = 0
    """Number of parameters of the checkpoint's layers of multi-token prediction, which are outside the policy."""
    generation_config: Mapping[str, Any] = field(default_factory=dict)
    """Keys and values that generation_config.json must have, so that engines compute the trainer's function."""

    @property
    def frozen(self) -> frozenset[str]:
        """Hugging Face's names of the tensors of frozen rules; conversions keep the type of these tensors."""
        return frozenset(name for rule in self.rules if rule.frozen for name in rule.hf_shapes)


def padded_vocab_size(vocab_size: int, tp_size: int) -> int:
    """The vocabulary size, rounded up to a multiple of the tensor-parallel size."""
    return -(-vocab_size // tp_size) * tp_size


def divided(total: int, parts: int, what: str) -> int:
    """Return total / parts. Raises ValueError if a remainder is left. what: the key or layer whose size is `total`,
    for the message."""
    if total % parts:
        raise ValueError(f"{what}: {total} is not a multiple of the parallel size {parts}")
    return total // parts


def require(config: Any, key: str, *allowed: Any) -> None:
    """Raises ValueError unless the value of the Hugging Face config's `key` is absent or one of `allowed`."""
    value = getattr(config, key, allowed[0])
    if value not in allowed:
        raise ValueError(f"config.json: {key}: {value!r} is not supported, only {' or '.join(map(repr, allowed))}")


def require_present(config: Any, key: str, value: Any) -> None:
    """Raises ValueError unless the Hugging Face config states `key` with this value. Engines read `key` from
    config.json, so the key must not be absent."""
    if getattr(config, key, None) != value:
        raise ValueError(f"config.json: {key} has to be {value!r}, because engines read this key")


def check_layout(family: Family, *, tp_size: int = 1, ep_size: int = 1, etp_size: int = 1) -> None:
    """Raises ValueError for a parallel size that does not divide the heads, key-value heads, MLPs or experts."""
    options = family.transformer
    experts = options.get("num_moe_experts") or 0
    if ep_size > 1 and not experts:
        raise ValueError(
            f"megatron.parallel.expert_model_parallel_size is {ep_size}, but the policy has no experts; "
            "leave the size at 1"
        )
    # A policy without experts has sizes 0, which every parallel size divides.
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
