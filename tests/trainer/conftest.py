"""One trainer process inside pytest: a world of one, created once for the tests of this folder that request it."""

import pytest


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    from random_policies import write_policy

    return write_policy(tmp_path_factory.mktemp("policy") / "llama")


@pytest.fixture(scope="module")
def new_trainer(policy):
    """Builds a trainer of the random policy; keywords are recipe sections."""
    from random_policy import make_recipe

    from megatron_scalerl.distributed import cpu_compat
    from megatron_scalerl.distributed.parallel import shutdown_parallel
    from megatron_scalerl.trainer.ranks import init_parallel
    from megatron_scalerl.trainer.step import make_trainer

    parallel = init_parallel(make_recipe(policy))

    def build(**sections):
        return make_trainer(make_recipe(policy, **sections), parallel)

    yield build
    shutdown_parallel()
    cpu_compat.uninstall()
