"""Layouts of weight updates by their sizes."""

MOE = ("qwen3_moe", "qwen3_moe_tied", "llama4", "llama4_tied")


def layout(kind, tp, pp, ep, cp):
    """Keys of a recipe's megatron.parallel, and what Megatron wants with them."""
    names = ("tensor_model", "pipeline_model", "expert_model", "context")
    found = {f"{name}_parallel_size": size for name, size in zip(names, (tp, pp, ep, cp)) if size > 1}
    if tp > 1 and kind in MOE:
        found["model"] = dict(sequence_parallel=True)  # Megatron's experts require it
        found |= dict(expert_tensor_parallel_size=1) if ep > 1 else {}
    return found
