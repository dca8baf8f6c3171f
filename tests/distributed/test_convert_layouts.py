"""A converted checkpoint loads in the usual way under every layout, and one of any layout converts back.

Why this matters: converter and trainer must agree on the position of every weight in every shard; a swapped pair
would still load. Not exercised: full-size checkpoints, network file systems.
"""

import shutil

import pytest
import torch
from hostile import Evil, first_key, place, saved
from layouts import grid, kind_of, layout_of
from random_policies import make
from runner import run_ranks
from safetensors.torch import load_file
from sampling import sampled

from megatron_scalerl.checkpoints.conversion import Options
from megatron_scalerl.checkpoints.safe_index import COMMON_OBJECT
from megatron_scalerl.checkpoints.to_hf import to_hf
from megatron_scalerl.checkpoints.to_megatron import to_megatron
from megatron_scalerl.checkpoints.verify import verify

pytestmark = pytest.mark.slow

KINDS = grid(
    """
    llama, llama_tied, llama_biased, mistral, qwen2_tied, qwen3_tied, qwen3_moe, qwen3_moe_tied,
    llama4, llama4_tied
    """
)
MOE = ("qwen3_moe", "llama4")
BY_TWO = [
    # one key-value head cannot be sharded; experts want sequence parallelism (Megatron's MoELayer)
    *(f"{kind} tp2{' sp' * kind.startswith(MOE)}" for kind in KINDS if kind != "qwen3_tied"),
    *(f"{kind} pp2" for kind in KINDS),
    *(f"{kind} {words}" for kind in MOE for words in ("ep2", "tp2 sp ep2 etp1")),
    "llama4 ep2 bf16",
]
SOME = [case.values[0] for case in sampled("converted layouts", BY_TWO, 5) if not case.marks]
BY_FOUR = ["llama tp2 pp2", "llama4 tp2 sp pp2 ep2 etp1", "qwen3_moe pp2 ep2"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Policies KIND.hf and their checkpoints KIND.megatron, with large parameters split into several chunks."""
    root = tmp_path_factory.mktemp("converted")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_scalerl.checkpoints.to_megatron.CHUNK_BYTES", 5000)
        for kind in KINDS:
            make(kind, root / f"{kind}.hf")
            to_megatron(root / f"{kind}.hf", root / f"{kind}.megatron")
    return root


@pytest.mark.parametrize(
    "world, rows",
    [
        pytest.param(1, KINDS, id="1"),
        pytest.param(2, SOME, id="some of 2"),
        pytest.param(2, BY_TWO, id="all of 2", marks=pytest.mark.full),
        pytest.param(4, BY_FOUR, id="all of 4", marks=pytest.mark.full),
    ],
)
def test_the_stock_load_opens_it_under_every_layout(world, rows, root):
    jobs = [(*(str(root / f"{kind_of(row)}.{kind}") for kind in ("hf", "megatron")), layout_of(row)) for row in rows]
    for rank, answers in enumerate(run_ranks(world, "convert_ranks:differing_parameters", jobs)):
        for row, answer in zip(rows, answers):
            assert answer["different"] == answer["ours"] == [], (rank, row)
            # Norms start as ones and are loaded as something else; matrices start random.
            assert answer["changed"] == answer["parameters"] > 10, (rank, row)


def test_every_rank_says_why_one_of_them_refuses(root, tmp_path):
    """The first stage alone reads the embedding."""
    folder = tmp_path / "megatron"
    shutil.copytree(root / "llama.megatron", folder)
    place(folder, first_key(folder, objects=False, containing="word_embeddings"), saved(Evil(tmp_path / "made")))
    both = run_ranks(2, "convert_ranks:refusals", [(str(root / "llama.hf"), str(folder), layout_of("llama pp2"))])
    assert both[0] == both[1] and not (tmp_path / "made").exists()
    assert both[0][0].startswith(f"{folder}/__99_0.distcp: cannot read the tensor ")


@pytest.mark.parametrize("row", sampled("stock layouts", ["llama tp2", "llama4 tp2 sp ep2 etp1", "qwen3_moe pp2"], 1))
def test_a_stock_checkpoint_of_any_layout_comes_back(row, root, tmp_path):
    source = root / f"{kind_of(row)}.hf"
    run_ranks(2, "convert_ranks:save_the_stock_way", [(str(source), str(tmp_path / "stock"), layout_of(row))])
    to_hf(tmp_path / "stock", tmp_path / "back", Options(verify=True), like=source)
    verify(source, tmp_path / "back")
    to_hf(tmp_path / "stock", tmp_path / "narrow", Options(dtype="BF16"), like=source)
    verify(source, tmp_path / "narrow", Options(dtype="BF16"))


def test_keys_shapes_and_types_are_those_of_the_stock_save(root, tmp_path):
    from torch.distributed.checkpoint import FileSystemReader

    kinds = ("llama_biased", "llama_tied", "qwen3_moe", "llama4")
    jobs = [(str(root / f"{kind}.hf"), str(tmp_path / kind), {}) for kind in kinds]
    run_ranks(1, "convert_ranks:save_the_stock_way", jobs)
    for kind in kinds:
        stock = FileSystemReader(tmp_path / kind).read_metadata().state_dict_metadata
        ours = FileSystemReader(root / f"{kind}.megatron").read_metadata().state_dict_metadata
        assert [key for key in stock if key not in ours] in ([], [COMMON_OBJECT])
        tensors = {key: entry for key, entry in stock.items() if hasattr(entry, "size")}
        assert {k: (ours[k].size, ours[k].properties) for k in tensors} == {
            k: (entry.size, entry.properties) for k, entry in tensors.items()
        }
        # Besides: the empty states that Transformer Engine's layers look for.
        assert all("_extra_state" in key for key in ours if key not in stock)


def test_chunks_are_read_by_torch_alone(root):
    from torch.distributed.checkpoint import FileSystemReader, load

    folder = root / "llama.megatron"
    target = {"output_layer.weight": torch.zeros(65, 64)}
    load(target, storage_reader=FileSystemReader(folder), no_dist=True)
    expected = load_file(root / "llama.hf" / "model.safetensors")["lm_head.weight"]
    assert torch.equal(target["output_layer.weight"], expected)
