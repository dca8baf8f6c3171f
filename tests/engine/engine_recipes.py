"""Recipes for engines that serve tiny policies."""

from recipe_files import SETTLED

from megatron_scalerl.recipe import Recipe

SECRET = "the-run-s-secret"


def recipe_for(folder, *, vllm=None, **sections):
    """A recipe whose engine serves a tiny policy."""
    defaults = {
        "policy": {"path": str(folder), "dtype": "float32"},
        "prompts": {"path": "none", "max_prompt_tokens": 64, **SETTLED},
        "interruption": {"thinking_tokens": [1, 1800], "answer_tokens": 100},
        "weights": {"bucket_mib": 1, "timeout_s": 120},
        "engine": {
            "vllm": {"max_model_len": 2048, "max_num_seqs": 32, "kv_cache_memory_bytes": 64 << 20} | (vllm or {})
        },
    }
    return Recipe(name="test", steps=1, **{k: defaults.get(k, {}) | sections.get(k, {}) for k in defaults | sections})
