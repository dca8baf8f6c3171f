"""Where Transformer Engine 2.20.2 has a fused attention for packed rows. Read in the source; one H200 has run it."""

MOST_SCORES = 1 << 30
"""Most scores of a deterministic backward pass on Hopper. The pass asks for 128 bytes of workspace per score."""


def why_unfused(
    capability: tuple[int, int], *, deterministic: bool, heads: float, longest: int, sequences: int = 1
) -> str:
    """The reason why attention would keep all scores of a row in memory; empty where a fused kernel keeps none.

    capability: CUDA's. heads: of one rank. longest: tokens of the longest sequence. sequences: fewest sequences of a
    row. Source: get_attention_backend (attention/dot_product_attention/utils.py:1789) and nvte_get_fused_attn_backend
    (common/fused_attn/fused_attn.cpp).
    """
    scores = sequences * heads * longest**2
    reason = ""
    if capability < (9, 0):
        reason = "Transformer Engine has no fused attention for packed rows below capability 9.0 without flash-attn"
    elif deterministic and capability == (9, 0) and scores >= MOST_SCORES:
        reason = (
            "trainer.deterministic: Transformer Engine has no deterministic fused attention for sequences of "
            f"{longest:,} tokens on Hopper"
        )
    return reason and f"{reason}; set MSRL_LAYERS=plain in the environment (plan: --layers plain)"
