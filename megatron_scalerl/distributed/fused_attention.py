"""Says for which GPUs and sequences Transformer Engine 2.20.2 has a fused attention kernel for packed rows.

The rules are taken from Transformer Engine's source. The kernel was also run on an H200.
"""

MOST_SCORES = 1 << 30
"""Number of attention scores (heads x queries x keys) from which on there is no deterministic fused backward pass on
Hopper. The pass would need 128 bytes of workspace per score."""


def why_unfused(
    capability: tuple[int, int], *, deterministic: bool, heads: float, longest: int, sequences: int = 1
) -> str:
    """The reason why no fused kernel can be used, so that attention would keep all scores of a row in memory. Empty
    if there is a fused kernel, which keeps no scores.

    capability: CUDA compute capability. heads: number of attention heads on one rank. longest: tokens of the longest
    sequence. sequences: least number of sequences in a row. Source in Transformer Engine: get_attention_backend
    (attention/dot_product_attention/utils.py:1789), nvte_get_fused_attn_backend (common/fused_attn/fused_attn.cpp).
    """
    scores = sequences * heads * longest**2
    reason = ""
    if capability < (9, 0):
        reason = "without flash-attn, Transformer Engine has no fused attention for packed rows below capability 9.0"
    elif deterministic and capability == (9, 0) and scores >= MOST_SCORES:
        reason = (
            "trainer.deterministic: Transformer Engine has no deterministic fused attention for sequences of "
            f"{longest:,} tokens on Hopper"
        )
    return reason and f"{reason}; set MSRL_LAYERS=plain in the environment (plan: --layers plain)"
