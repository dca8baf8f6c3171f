"""Gated MLPs and experts: rules of the weight map by the checkpoint's names, and the options of routers."""

from functools import partial
from typing import Any

from megatron_scalerl.models import rules
from megatron_scalerl.models.family import LayerStyle, Rule, require
from megatron_scalerl.models.rules import Location
from megatron_scalerl.record import record

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
"""Names of a gated MLP's projections in most checkpoints."""


@record
class Experts:
    """The experts of a family's layers: sizes, router, and names in Hugging Face checkpoints."""

    count: int
    ffn: int
    """Width of an expert's hidden layer."""
    width_key: str = "moe_intermediate_size"
    """Key of config.json that holds the width `ffn`, for error messages."""
    router: dict[str, Any]
    """Fields of TransformerConfig for the router, from `softmax_router` or `sigmoid_router`."""
    module: str = "mlp."
    projections: tuple[str, str, str] = PROJECTIONS
    router_bias: str = ""
    """Tensor name of the router's frozen bias after the prefix `module`; empty for a router without a bias."""
    shared_ffn: int = 0
    """Width of the shared expert's hidden layer; 0 without a shared expert."""
    fused: bool = False
    """True if a layer's experts are fused into two tensors, [experts, 2 ffn, hidden] and [experts, hidden, ffn]."""

    def options(self) -> dict[str, Any]:
        """Fields of TransformerConfig for experts and router."""
        shared = {}
        if self.shared_ffn:
            shared["moe_shared_expert_intermediate_size"] = self.shared_ffn
        return dict(num_moe_experts=self.count, moe_ffn_hidden_size=self.ffn, **shared, **self.router)

    def rules(self, layer: int, hidden: int) -> list[Rule]:
        """Weight-map rules of a layer's router, shared expert (if any) and experts."""
        hf = f"model.layers.{layer}.{self.module}"
        megatron = f"decoder.layers.{layer}.mlp."
        at = Location(layer=layer)
        sizes: dict[str, Any] = dict(hidden=hidden, what=f"config.json: {self.width_key}")
        weight_map = [rules.replicated(f"{megatron}router.weight", f"{hf}gate.weight", (self.count, hidden), at)]
        if self.router_bias:
            name = f"{hf}{self.router_bias}"
            weight_map.append(rules.replicated(f"{megatron}router.expert_bias", name, (self.count,), at, frozen=True))
        if self.shared_ffn:
            shared = (f"{hf}shared_experts.", f"{megatron}shared_experts.")
            weight_map += mlp_rules(*shared, ffn=self.shared_ffn, at=at, **sizes)
        make_rules = partial(expert_rules, projections=self.projections)
        if self.fused:
            make_rules = partial(fused_expert_rules, transposed=False)
        return weight_map + make_rules(
            f"{hf}experts.", megatron, layer=layer, experts=self.count, ffn=self.ffn, **sizes
        )


def softmax_router(config: Any, *, normalized: bool) -> dict[str, Any]:
    """Fields of TransformerConfig for a router with a softmax over all experts.

    `normalized`: whether the chosen experts' probabilities are scaled to the sum 1. Raises ValueError for a router
    whose probabilities would all be 1.
    """
    return dict(
        moe_router_topk=_top_k(config, normalized=normalized),
        moe_router_score_function="softmax",
        # Normalized probabilities equal a softmax over the chosen experts alone, without a softmax before the choice.
        moe_router_pre_softmax=not normalized,
    )


def sigmoid_router(config: Any) -> dict[str, Any]:
    """Fields of TransformerConfig for a router with sigmoids and a frozen bias.

    The chosen experts' sigmoids are scaled to the sum 1. Raises ValueError for a router whose probabilities would all
    be 1, and for groups of experts that Megatron-Core scores differently.
    """
    topk = _top_k(config, normalized=True)
    router = dict(
        moe_router_topk=topk,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_topk_scaling_factor=getattr(config, "routed_scaling_factor", None),
    )
    groups = getattr(config, "n_group", 1)
    chosen = getattr(config, "topk_group", 1)
    if groups <= chosen:
        return router
    if topk // chosen != 2:
        raise ValueError(
            f"config.json: num_experts_per_tok: {topk} experts from {chosen} groups (topk_group) are not supported, "
            "only two experts per group; Megatron-Core would score groups in another way than engines"
        )
    return router | dict(moe_router_num_groups=groups, moe_router_group_topk=chosen)


def sigmoid_experts(config: Any) -> Experts:
    """Experts by DeepSeek-V3's keys, with a shared expert. Raises ValueError as `sigmoid_router`, and for counts
    below 1."""
    require(config, "norm_topk_prob", True)
    for key in ("num_experts_per_tok", "n_routed_experts", "n_group", "topk_group", "n_shared_experts"):
        if not getattr(config, key):
            raise ValueError(f"config.json: {key} has to be at least 1")
    return Experts(
        count=config.n_routed_experts,
        ffn=config.moe_intermediate_size,
        router=sigmoid_router(config),
        router_bias="gate.e_score_correction_bias",
        shared_ffn=config.n_shared_experts * config.moe_intermediate_size,
    )


def dense_first(config: Any, **style: Any) -> tuple[LayerStyle, ...]:
    """The styles of all layers: `first_k_dense_replace` dense layers, and then layers with experts.

    `style`: further fields of each LayerStyle.
    """
    dense = config.first_k_dense_replace or 0
    return tuple(LayerStyle(moe=layer >= dense, **style) for layer in range(config.num_hidden_layers))


def _top_k(config: Any, *, normalized: bool) -> int:
    # A single normalized probability is always 1, so the router would get no gradient.
    if normalized and config.num_experts_per_tok < 2:
        raise ValueError(
            f"config.json: num_experts_per_tok: {config.num_experts_per_tok} is too few: the normalized "
            "probability of one expert is always 1, so that the router cannot learn; take at least 2"
        )
    return config.num_experts_per_tok


def mlp_rules(
    hf: str,
    megatron: str,
    *,
    ffn: int,
    hidden: int,
    at: Location,
    what: str = "config.json: intermediate_size",
    projections: tuple[str, str, str] = PROJECTIONS,
) -> list[Rule]:
    """Rules of a gated MLP.

    hf: prefix of the tensor names of `projections` (gate, up, down). megatron: prefix of linear_fc1.weight and
    linear_fc2.weight. what: key of config.json with the width `ffn`, for error messages.
    """
    gate, up, down = (f"{hf}{projection}.weight" for projection in projections)
    return [
        rules.gate_up(f"{megatron}linear_fc1.weight", gate, up, ffn=ffn, hidden=hidden, at=at, what=what),
        rules.row(f"{megatron}linear_fc2.weight", down, hidden, ffn, at, what=what),
    ]


def expert_rules(hf: str, megatron: str, *, experts: int, layer: int, **mlp: Any) -> list[Rule]:
    """Rules of experts that are separate gated MLPs in the checkpoint.

    hf: prefix of the experts' tensor names, to which the expert's number and a dot are added. mlp: keywords of
    `mlp_rules`.
    """
    weight_map = []
    for expert in range(experts):
        at = Location(layer=layer, expert=expert)
        name = f"{megatron}experts.local_experts.{expert}."
        weight_map += mlp_rules(f"{hf}{expert}.", name, at=at, **mlp)
    return weight_map


def fused_expert_rules(
    hf: str, megatron: str, *, experts: int, ffn: int, hidden: int, layer: int, what: str, transposed: bool
) -> list[Rule]:
    """Rules of experts that are fused into two tensors, gate_up_proj and down_proj with the prefix `hf`.

    `transposed`: whether the tensors are stored as [in, out].
    """
    weight_map = []
    sizes = dict(experts=experts, ffn=ffn, hidden=hidden)
    for projection, tensor, make_rule in (
        ("linear_fc1", "gate_up_proj", rules.fused_expert_gate_up),
        ("linear_fc2", "down_proj", rules.fused_expert_down),
    ):
        for expert in range(experts):
            name = f"{megatron}experts.local_experts.{expert}.{projection}.weight"
            at = Location(layer=layer, expert=expert)
            weight_map.append(make_rule(name, f"{hf}{tensor}", at=at, what=what, transposed=transposed, **sizes))
    return weight_map
