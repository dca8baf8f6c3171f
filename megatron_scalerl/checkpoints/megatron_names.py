"""Names of Megatron-Core's parameters: where layer and expert numbers are, and Transformer Engine's other names.

Read from megatron-core 0.16.1. Imports no torch.
"""

from __future__ import annotations

import re

LAYER = re.compile(r"^decoder\.layers\.(\d+)\.")
EXPERT = re.compile(r"\.experts\.local_experts\.(\d+)\.")
"""An expert as a module of its own."""
GROUPED_EXPERT = re.compile(r"\.experts\.linear_fc([12])\.weight(\d+)$")
"""An expert inside Transformer Engine's grouped linear layer: projection, expert."""
FUSED_NORMS = {
    ".input_layernorm.weight": ".self_attention.linear_qkv.layer_norm_weight",
    ".pre_mlp_layernorm.weight": ".mlp.linear_fc1.layer_norm_weight",
}
"""Norm of a plain layer -> its name where Transformer Engine fuses it into the next linear layer."""
