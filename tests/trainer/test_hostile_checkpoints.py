"""A trainer resumes from its own checkpoints and starts from others', and executes nothing from them."""

import inspect
import pickle
import shutil
from argparse import Namespace
from functools import partial

import numpy as np
import pytest
import torch
from hostile import Evil, edit_metadata, first_key, place, recommit, saved
from megatron.core.dist_checkpointing.strategies import torch as torch_strategies
from random_policy import batches_of, random_samples
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from megatron_scalerl.checkpoints.safe_index import COMMON_OBJECT
from megatron_scalerl.trainer.checkpoint import load, save


@pytest.fixture(scope="module")
def original(new_trainer, tmp_path_factory):
    """A checkpoint after one step."""
    trainer = new_trainer()
    [batch] = batches_of(random_samples(1), step=1)
    trainer.step(batch)
    path = tmp_path_factory.mktemp("checkpoints") / "step_000001"
    save(path, trainer, {})
    return path


@pytest.fixture
def folder(original, tmp_path):
    """The checkpoint, to be modified."""
    shutil.copytree(original, tmp_path / "step_000001")
    return tmp_path / "step_000001"


@pytest.fixture
def marker(tmp_path):
    """What a hostile pickle would make."""
    return tmp_path / "made_by_a_pickle"


@pytest.fixture(scope="module")
def resuming(new_trainer):
    """A trainer that loads what the tests give it."""
    return new_trainer()


@pytest.fixture
def refused(new_trainer, resuming, policy, folder, marker):
    """Resumes from the folder and starts from it, and returns the two lines that say why not. None: it went well."""

    def line(open_it):
        try:
            open_it()
        except ValueError as error:
            assert len(str(error).splitlines()) == 1
            return str(error)
        finally:
            assert not marker.exists()
        return None

    def run():
        resumed = line(lambda: load(folder, resuming))
        start = {"path": str(policy), "dtype": "float32", "megatron_path": str(folder)}
        return resumed, line(lambda: new_trainer(policy=start))

    return run


def named(folder, key, name="posix.mkdir"):
    """The line about an object whose archive has a name that is not allowed."""
    return f"{folder}/__99_0.distcp: cannot read {key.fqn} from byte 0 on: the pickled name {name} is not allowed"


def test_a_whole_metadata_that_calls(folder, marker, refused):
    (folder / ".metadata").write_bytes(pickle.dumps(Evil(marker)))
    recommit(folder)
    what = "this file is not valid checkpoint metadata"
    refusal = f"{folder}/.metadata: {what}: the pickled name posix.mkdir is not allowed"
    assert refused() == (refusal, refusal)


OBJECTS = {
    # a start takes nothing from the common object and from generators, and does not open them
    "common": (COMMON_OBJECT, lambda m: Evil(m), "posix.mkdir", False),
    "within": (COMMON_OBJECT, lambda m: {"optimizer": {"param_groups": [Evil(m)]}}, "posix.mkdir", False),
    "namespace": (COMMON_OBJECT, lambda m: {"args": Namespace(hidden_size=8)}, "argparse.Namespace", False),
    "generators": ("generators", lambda m: {"python": Evil(m)}, "posix.mkdir", False),
    "extra state": ("_extra_state", lambda m: Evil(m), "posix.mkdir", True),
}
"""An object of the checkpoint -> the name that its pickle calls, and whether a start opens it, too."""


@pytest.mark.parametrize("name", OBJECTS)
def test_an_object_that_calls(name, folder, marker, refused):
    containing, content, called, started = OBJECTS[name]
    key = first_key(folder, objects=True, containing=containing)
    place(folder, key, saved([content(marker)]))
    assert refused() == (named(folder, key, called), named(folder, key, called) if started else None)


def test_arrays_are_read_from_a_runs_own_checkpoints_only(folder, refused):
    """numpy takes what a pickle says of a type, even that its items are pointers."""
    key = first_key(folder, objects=True, containing="_extra_state")
    place(folder, key, saved([np.zeros(2, np.uint32)]))
    resumed, started = refused()
    assert " is not empty; " in resumed
    assert started == named(folder, key, "numpy._core.multiarray._reconstruct")


def test_an_extra_state_with_content(folder, refused):
    """What Transformer Engine would unpickle."""
    key = first_key(folder, objects=True, containing="_extra_state")
    place(folder, key, saved([torch.zeros(8, dtype=torch.uint8)]))
    assert all(s.startswith(f"{folder}/__99_0.distcp: the extra state {key.fqn} is not empty; ") for s in refused())


def test_a_tensor_that_calls(folder, marker, refused):
    index = first_key(folder, objects=False)
    place(folder, index, saved(Evil(marker)))
    what = f"cannot read the tensor {index.fqn} from byte 0 on"
    refusal = f"{folder}/__99_0.distcp: {what}: the pickled name posix.mkdir is not allowed"
    assert refused() == (refusal, refusal)


def test_a_tensor_of_another_shape(folder, refused):
    index = first_key(folder, objects=False)
    place(folder, index, saved(torch.zeros(3)))
    assert all(f"__99_0.distcp: {index.fqn}: the stored shape is [3], " in refusal for refusal in refused())


def test_a_checkpoint_of_another_policy(folder, refused):
    index = first_key(folder, objects=False)
    edit_metadata(folder, lambda m: m.state_dict_metadata.pop(index.fqn) and None)
    for refusal in refused():
        assert refusal.startswith(f"{folder}: the checkpoint was saved with another policy or optimizer (mega")
        assert refusal.endswith(f": the checkpoint lacks {index.fqn}")


def test_a_whole_checkpoint_opens(folder, refused):
    assert refused() == (None, None)


def test_torch_and_megatron_still_read_where_ours_is_put(new_trainer, folder, monkeypatch):
    """Upstream as it was read: the strategy asks this function for its reader, and the planner keeps these two."""
    source = inspect.getsource(torch_strategies.TorchDistLoadShardedStrategy.load)
    assert source.count("_get_filesystem_reader(") == 1 and source.count("FileSystemReader(") == 0
    planner = inspect.getsource(DefaultLoadPlanner.load_bytes)
    assert "self.original_state_dict" in planner and "self.mappings[read_item.dest_index.fqn]" in planner
    kept = torch_strategies._get_filesystem_reader
    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    monkeypatch.setattr(torch, "load", partial(weights_alone, torch.load))
    monkeypatch.setattr(torch_strategies.FileSystemReader, "read_metadata", forbidden)
    # torch's collectives, by which ranks hand each other plans, have kept the class under a name of their own.
    load(folder, new_trainer())
    assert torch_strategies._get_filesystem_reader is kept


def weights_alone(load, *arguments, weights_only, **options):
    assert weights_only is True
    return load(*arguments, weights_only=True, **options)


def forbidden(*_, **__):
    raise AssertionError("unpickled")
