"""Routing replay: the trainer's routers use the experts that the engine chose.

Trainer and engine round differently, and a router with two nearly equal experts may then choose a different expert:
the token's log-probability changes by far more than rounding. With the engine's choices the trainer's routers compute
the experts' weights only, forward and backward, and still get gradients through these weights.

The life of the choices: the engine sends the choices with a completion; `PolicyModel.hidden_states` puts this rank's
choices into the row; a pre-hook of each layer gives the layer's choices to the router, which asks for choices in
place of a top-k.

Megatron-Core's own RouterReplay keeps one set of choices per process, and distinguishes forward from recomputation by
a flag. Here the choices are part of the row (`PackedRow.expert_choices`), so any pipeline schedule and the
recomputation of whole layers use the choices of the right micro-batch.
"""

from collections.abc import Callable
from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe.router_replay import RouterReplay

UNKNOWN = -1
"""Stands for the engine's choice if it is unknown; the router then chooses.

Of a token's K choices all or none are unknown."""


class ReplayedRouting(RouterReplay):
    """Replays the experts of the current row at one router."""

    def __init__(self, layer: int):
        # super().__init__ is not called: it would append the object to a global list that is never emptied
        # (global_router_replay_instances in transformer/moe/router_replay.py).
        self.layer = layer
        self.choices: torch.Tensor | None = None

    def before_layer(self, _module: torch.nn.Module, _args: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        """Forward pre-hook of the transformer layer: reads this layer's choices from the row."""
        # Megatron's recomputation in the backward pass calls the layer again, and so runs this hook again.
        self.choices = getattr(keywords.get("packed_seq_params"), "expert_choices", None)
        if self.choices is not None:
            self.choices = self.choices[:, self.layer]

    def get_replay_topk(
        self,
        scores: torch.Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., Any] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns (scores [n, K], experts [n, K]) from scores [n, E]: the experts that the row's choices name.

        Where the choice is unknown, and in a row without choices, the router's top K are returned.

        Raises ValueError if the row's choices do not have the shape [n, K].
        """
        assert default_compute_topk is not None
        router_scores, experts = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.choices is None:
            return router_scores, experts
        if self.choices.shape != experts.shape:
            raise ValueError(
                f"expert_choices: the engine's choices for layer {self.layer} have shape {list(self.choices.shape)}, "
                f"but the router of this layer needs {list(experts.shape)}"
            )
        # `where` needs no branch. A branch would make the host wait for the device in every layer.
        experts = torch.where(self.choices == UNKNOWN, experts, self.choices.to(experts.dtype))
        return scores.gather(1, experts), experts


def install(decoder: Any) -> None:
    """Installs a ReplayedRouting at every router of a decoder's layers. For rows without choices routers choose."""
    for layer in decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            replay = ReplayedRouting(layer.layer_number - 1)
            router.router_replay = replay
            layer.register_forward_pre_hook(replay.before_layer, with_kwargs=True)


def freeze_biases(decoder: Any) -> None:
    """Keeps the biases of a decoder's routers in fp32 and unchanged."""
    for layer in decoder.layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            router.frozen_expert_bias = True
            router._maintain_float32_expert_bias()


def check_replay(config: TransformerConfig, *, pipeline_size: int) -> None:
    """Raises ValueError for options under which a router would not see the row's choices."""
    if config.num_moe_experts is None:
        raise ValueError("rollouts.routing_replay: the policy is dense and has no routers; leave it out")
    if config.moe_router_fusion:
        raise ValueError(
            "rollouts.routing_replay: a fused router takes no choices; set megatron.model.moe_router_fusion to false"
        )
    partly = config.recompute_granularity == "selective" and "moe" in (config.recompute_modules or ())
    if partly and pipeline_size > 1:
        raise ValueError(
            "rollouts.routing_replay: in a pipeline the recomputation of moe would use another micro-batch's "
            "choices; take moe out of megatron.model.recompute_modules"
        )
