"""The slot of an adapter in vLLM's own LoRA layers, cut for one tensor-parallel rank of two."""

from types import SimpleNamespace

import pytest
import torch

from megatron_scalerl.weights.digest import total, value_digest
from megatron_scalerl.weights.plan import manifest_of
from megatron_scalerl.weights.transport.frames import Values

pytestmark = pytest.mark.slow  # imports vLLM

RANK, ROOM, HIDDEN = 3, 8, 16
SIZES = {"q_proj": 12, "k_proj": 4, "v_proj": 4}
STEM = "base_model.model.model.layers.0.self_attn."


def layer(kind, inputs, outputs, **attributes):
    """A layer of vLLM's class as it is on rank 1 of 2."""
    made = object.__new__(kind)
    torch.nn.Module.__init__(made)
    made.tp_size, made.tp_rank, made.n_slices = 2, 1, len(outputs)
    made.lora_a_stacked = tuple(torch.zeros(1, 1, ROOM, inputs) for _ in outputs)
    made.lora_b_stacked = tuple(torch.zeros(1, 1, size, ROOM) for size in outputs)
    for name, value in attributes.items():
        setattr(made, name, value)
    return made


@pytest.fixture
def manager():
    from vllm.lora.layers import MergedQKVParallelLinearWithLoRA, RowParallelLinearWithLoRA

    halves = tuple(size // 2 for size in SIZES.values())
    at = "model.layers.0.self_attn."
    return SimpleNamespace(
        model=SimpleNamespace(),
        modules={
            f"{at}qkv_proj": layer(
                MergedQKVParallelLinearWithLoRA, HIDDEN, halves, output_slices=halves, output_ids=(1, 1, 1)
            ),
            f"{at}o_proj": layer(RowParallelLinearWithLoRA, 6, (HIDDEN,), input_size=6),
        },
        packed_modules={f"{at}qkv_proj": [f"{at}{name}" for name in SIZES]},
    )


def factors(*names):
    generator = torch.Generator().manual_seed(1)
    shapes = {name: (HIDDEN, size) for name, size in SIZES.items()} | {"o_proj": (12, HIDDEN)}
    tensors = {}
    for name in names:
        inputs, outputs = shapes[name]
        tensors[f"{STEM}{name}.lora_A.weight"] = torch.randn(RANK, inputs, generator=generator)
        tensors[f"{STEM}{name}.lora_B.weight"] = torch.randn(outputs, RANK, generator=generator)
    return tensors


def live_of(manager, tensors):
    from megatron_scalerl.weights.adapter_slot import AdapterSlot
    from megatron_scalerl.weights.live_weights import LiveWeights

    manifest = manifest_of((name, "float32", t.shape) for name, t in tensors.items())
    return LiveWeights(AdapterSlot(manager, manifest), manifest)


def test_a_rank_needs_and_holds_its_part_as_vllm_cuts_it(manager):
    tensors = factors("q_proj", "v_proj", "o_proj")
    live = live_of(manager, tensors)
    needs = dict(zip(tensors, live.needs))
    assert needs[f"{STEM}q_proj.lora_A.weight"] == (((0, RANK), (0, HIDDEN)),)
    assert needs[f"{STEM}q_proj.lora_B.weight"] == (((6, 12), (0, RANK)),)
    assert needs[f"{STEM}o_proj.lora_A.weight"] == (((0, RANK), (6, 12)),)
    assert needs[f"{STEM}o_proj.lora_B.weight"] == (((0, HIDDEN), (0, RANK)),)

    digests = []
    for number, (name, tensor) in enumerate(tensors.items()):
        [ranges] = needs[name]
        part = tensor[tuple(slice(a, b) for a, b in ranges)]
        live.write(Values(tensor=number, ranges=ranges, values=part))
        digests.append(value_digest(part, number, range(2), [range(a, b) for a, b in ranges]))
    live.finish()
    assert live.digest() == total(digests)
    qkv, output = manager.modules.values()
    assert torch.equal(qkv.lora_b_stacked[0][0, 0, :, :RANK], tensors[f"{STEM}q_proj.lora_B.weight"][6:])
    assert torch.equal(qkv.lora_a_stacked[2][0, 0, :RANK], tensors[f"{STEM}v_proj.lora_A.weight"])
    assert torch.equal(output.lora_a_stacked[0][0, 0, :RANK], tensors[f"{STEM}o_proj.lora_A.weight"][:, 6:])
    # no target, and the room above the adapter's rank
    assert not qkv.lora_a_stacked[1].any() and not qkv.lora_b_stacked[0][..., RANK:].any()


def test_another_adapter_leaves_nothing_of_the_one_before(manager):
    live = live_of(manager, factors("q_proj"))
    live.write(Values(tensor=0, ranges=live.needs[0][0], values=torch.ones(RANK, HIDDEN)))
    assert manager.modules["model.layers.0.self_attn.qkv_proj"].lora_a_stacked[0].any()
    live_of(manager, factors("o_proj"))
    assert not manager.modules["model.layers.0.self_attn.qkv_proj"].lora_a_stacked[0].any()


def test_a_factor_without_its_partner_and_a_type_that_the_slot_cannot_hold_are_refused(manager):
    from megatron_scalerl.weights.plan import manifest_to_json
    from megatron_scalerl.weights.weight_receiver import needs_of

    tensors = factors("q_proj")
    alone = manifest_of((name, "float32", t.shape) for name, t in tensors.items() if "lora_A" in name)
    model = SimpleNamespace(lora_manager=manager)
    with pytest.raises(ValueError, match=r"q_proj\.lora_B"):
        needs_of(model, manifest_to_json(alone))
    for stacked in manager.modules.values():
        stacked.lora_a_stacked = tuple(a.bfloat16() for a in stacked.lora_a_stacked)
    wide = manifest_of((name, "float32", t.shape) for name, t in tensors.items())
    with pytest.raises(ValueError, match=r"lora_A\.weight: .* cannot hold all values of torch\.float32"):
        needs_of(model, manifest_to_json(wide))
