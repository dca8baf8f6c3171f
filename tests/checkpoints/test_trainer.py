"""The trainer starts from a converted checkpoint, and its own checkpoints are exported without loading them."""

import shutil

import pytest
import torch
from gathered_weights import gathered
from random_policies import make
from random_policy import batches_of, make_recipe, random_samples
from safetensors.torch import load_file, save_file

from megatron_scalerl.checkpoints.conversion import Options
from megatron_scalerl.checkpoints.to_hf import to_hf
from megatron_scalerl.checkpoints.to_megatron import to_megatron
from megatron_scalerl.distributed import cpu_compat
from megatron_scalerl.distributed.parallel import shutdown_parallel, unwrap
from megatron_scalerl.trainer import checkpoint
from megatron_scalerl.trainer.ranks import init_parallel
from megatron_scalerl.trainer.step import make_trainer
from megatron_scalerl.weights.source import MegatronWeightSource


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    folder = tmp_path_factory.mktemp("policy") / "hf"
    make("llama4", folder)
    return folder


@pytest.fixture(scope="module")
def parallel(policy):
    yield init_parallel(make_recipe(policy))
    shutdown_parallel()
    cpu_compat.uninstall()


def stepped(trainer):
    """Parameters after one step."""
    [batch] = batches_of(random_samples(1), step=1)
    trainer.step(batch)
    return {name: p.detach().clone() for name, p in unwrap(trainer.chunks[0]).named_parameters()}


def check_equal(found, expected):
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(value, found[name])] == []


def test_a_trainer_that_starts_from_it_makes_the_same_step(policy, parallel, tmp_path):
    """The converted weights differ from those in the recipe's folder, so that the source of the weights shows."""
    other = tmp_path / "other"
    shutil.copytree(policy, other)
    save_file({n: t / 2 for n, t in load_file(policy / "model.safetensors").items()}, other / "model.safetensors")
    to_megatron(other, tmp_path / "megatron")
    expected = stepped(make_trainer(make_recipe(other), parallel))
    start = {"path": str(policy), "dtype": "float32", "megatron_path": str(tmp_path / "megatron")}
    found = stepped(make_trainer(make_recipe(policy, policy=start), parallel))
    check_equal(found, expected)
    with pytest.raises(ValueError, match="COMMIT: this file does not exist"):
        make_trainer(make_recipe(policy, policy={**start, "megatron_path": str(tmp_path / "none")}), parallel)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_runs_checkpoint_is_exported_as_the_trainer_has_it(dtype, policy, parallel, tmp_path):
    recipe = make_recipe(policy, policy={"path": str(policy), "dtype": dtype}, optimizer={"lr": 1e-2})
    trainer = make_trainer(recipe, parallel)
    stepped(trainer)
    checkpoint.save(tmp_path / "step_000001", trainer, {})
    expected = gathered(MegatronWeightSource(trainer.chunks, parallel))

    to_hf(tmp_path / "step_000001", tmp_path / "out", Options(verify=True), like=policy)

    found, before = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", policy))
    check_equal(found, expected)
    assert any(not torch.equal(value.float(), before[name]) for name, value in found.items())
    assert f'"dtype": "{dtype}"' in (tmp_path / "out/config.json").read_text()
