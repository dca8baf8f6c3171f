"""Recipes for engines that serve tiny policies, and such engines."""

import contextlib
import os
import re
from pathlib import Path

import pytest
from recipe_files import SETTLED

from megatron_scalerl.launch.process import EngineProcess
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


@contextlib.contextmanager
def served(run, recipe, log):
    """A server of the recipe, whose processes may import the modules of this folder."""
    process = EngineProcess.local(recipe, secret=SECRET, log_path=log)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        run(process.start())
    yield process
    run(process.stop())


async def cache_hits(client):
    """Tokens that the engine has taken from its prefix cache, in all."""
    text = (await client.get("/metrics")).decode()
    [count] = re.findall(r"^vllm:prefix_cache_hits_total\{.*\} (.*)$", text, re.MULTILINE)
    return float(count)
