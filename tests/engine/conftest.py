"""One real vLLM server for the tests of this folder."""

import asyncio

import pytest
from engine_recipes import recipe_for, served


@pytest.fixture(scope="session")
def run():
    """Runs a coroutine on the event loop of the session's engine."""
    with asyncio.Runner() as runner:
        yield runner.run


@pytest.fixture(scope="session")
def policies(tmp_path_factory):
    """Two dense policies of one shape, and two Llama-4 style mixtures of experts."""
    import tiny_policies  # torch and transformers, which the quick tests of this folder do not need

    root = tmp_path_factory.mktemp("policies")
    names = {"dense_a": 0, "dense_b": 1, "moe_a": 2, "moe_b": 3}
    return {name: tiny_policies.make(root / name, name.split("_")[0], seed) for name, seed in names.items()}


@pytest.fixture(scope="session")
def engine(run, policies, tmp_path_factory):
    """A server of policy dense_a in float32; tests that change its weights restore them."""
    recipe = recipe_for(policies["dense_a"], vllm={"middleware": "server_insight.Insight"})
    with served(run, recipe, tmp_path_factory.mktemp("engine") / "engine.log") as process:
        yield process
