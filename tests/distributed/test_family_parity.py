"""Every family equals Hugging Face: logits to 5e-5 under every layout, weights to the bit after a round trip.

Why this matters: a wrong rotary pair, norm or router shifts log-probabilities by little and training by much. Each
feature is also turned off once, and must then differ. Not exercised: published weights at full size (tests/models
checks their shapes), Transformer Engine's layers.
"""

import family_ranks
import pytest
import random_policies
import torch
from chosen import Worlds, chosen
from layouts import grid, kind_of, layout_of
from runner import run_ranks
from safetensors.torch import load_file
from sampling import sampled

from megatron_scalerl.checkpoints.hf_folder import family_of_folder, open_folder
from megatron_scalerl.checkpoints.to_hf import to_hf
from megatron_scalerl.checkpoints.to_megatron import to_megatron

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

KINDS = tuple(random_policies.KINDS)
HEADS = grid("llama, llama_tied, mistral, qwen2, qwen3, qwen3_moe, llama4")
"""Policies whose log-probabilities and entropies are compared, too."""


def _layouts(kind):
    """Layouts of two ranks; one key-value head cannot be sharded, dense layers have no experts."""
    experts = kind.startswith(random_policies.WITH_EXPERTS)
    return ["pp2", *([] if kind == "qwen3_tied" else ["tp2 sp"]), "ep2" if experts else "dp2"]


BY_TWO = [f"{kind} {words}" for kind in KINDS for words in _layouts(kind)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("families")


class HuggingFace(dict):
    """Kind -> Hugging Face's logits of the row, sequence by sequence; saves the policy in fp32 and in bf16."""

    def __init__(self, root):
        super().__init__()
        self._root = root

    def __missing__(self, kind):
        random_policies.make(kind, self._root / f"{kind} bf16", dtype=torch.bfloat16)
        model = random_policies.make(kind, self._root / kind)
        with torch.no_grad():
            self[kind] = random_policies.row_logits(model, random_policies.rows()[1])
        assert 5.0 < self[kind].abs().max() < 20.0
        return self[kind]


@pytest.fixture(scope="module")
def expected(root):
    return HuggingFace(root)


def jobs(root, expected, names):
    """Every policy in fp32, and once more in bf16, saved beside its source."""
    found = []
    for name in sorted(names):
        assert expected[kind_of(name)] is not None  # its folder is there
        for suffix in ("", " bf16"):
            row = f"{name}{suffix}"
            found.append(
                (row, str(root / f"{kind_of(name)}{suffix}"), layout_of(row), str(root / f"{row}.safetensors"))
            )
    return found


@pytest.fixture(scope="module")
def measured(request, root, expected):
    def jobs_of(size):
        return jobs(root, expected, {name for name in chosen(request, "name") if (name in KINDS) == (size == 1)})

    return Worlds("family_ranks:logits_and_saved", jobs_of)


@pytest.fixture(scope="module")
def exported(root, expected):
    """A folder of two Llama 4 policies that were converted to Megatron's format and back."""
    folder = root / "exported"
    folder.mkdir()
    for kind in ("llama4", "llama4_multimodal"):
        assert expected[kind] is not None
        to_megatron(root / kind, root / f"{kind}.megatron")
        to_hf(root / f"{kind}.megatron", folder / kind)
    return folder


@pytest.fixture(scope="module")
def without(request, root, expected):
    kinds = {feature: feature.split(":")[0] for feature in sorted(chosen(request, "feature"))}
    assert all(expected[kind] is not None for kind in kinds.values())
    features = [(feature, str(root / kind)) for feature, kind in kinds.items()]
    return run_ranks(1, "family_ranks:logits_without", features)[0]


@pytest.mark.parametrize("name", [*sampled("families", KINDS, 3), *sampled("families on two ranks", BY_TWO, 3)])
def test_logits_are_those_of_hugging_face(name, root, expected, measured):
    """Packed here, sequence by sequence there; and what is saved is the source, to the bit, in fp32 and in bf16."""
    answers = measured[1 if name in KINDS else 2]
    ranks = [rank[name] for rank in answers if name in rank]
    assert len(ranks) == (1 if "pp2" in name else len(answers))
    for logits, (logprobs, entropies) in ranks:
        assert (logits - expected[kind_of(name)]).abs().max() < 5e-5
        if name in HEADS:
            exact = expected[name].double()
            found = random_policies.of_targets(exact, random_policies.rows()[1]["targets"])
            assert (logprobs - found).abs().max() < 5e-5
            assert (entropies - torch.distributions.Categorical(logits=exact).entropy()).abs().max() < 5e-5
    for suffix in ("", " bf16"):
        same_weights(root / f"{kind_of(name)}{suffix}", root / f"{name}{suffix}.safetensors")


@pytest.mark.parametrize("feature", sampled("features of families", family_ranks.WITHOUT, 3))
def test_every_feature_of_a_family_is_felt(feature, expected, without):
    """A policy without it is far from Hugging Face on the same row: the tests above see that it is there."""
    kind = feature.split(":")[0]
    assert (without[feature][0] - expected[kind]).abs().max() > 100 * 5e-5


def same_weights(source, saved):
    """Names, types, shapes and bytes of every tensor of the policy."""
    outside = family_of_folder(source).passthrough
    before = {name: t for name, t in whole(source).items() if not (outside and name.startswith(outside))}
    after = load_file(saved)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype and after[name].shape == tensor.shape, name
        assert torch.equal(after[name].view(torch.uint8), tensor.view(torch.uint8)), name


def whole(folder):
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def test_the_layouts_on_disk_are_the_ones_meant(root, expected):
    assert all(expected[kind] is not None for kind in ("qwen3_moe", "qwen3_moe_tied", "llama4_tied"))
    assert "model.layers.0.mlp.experts.3.up_proj.weight" in open_folder(root / "qwen3_moe").tensors
    assert "model.layers.1.mlp.experts.gate_up_proj" in open_folder(root / "qwen3_moe_tied").tensors
    assert "lm_head.weight" not in open_folder(root / "llama4_tied").tensors


def test_a_multimodal_policy_is_a_whole_checkpoint_again(root, exported):
    """The vision tower's bytes are copied, and transformers runs it."""
    from transformers import Llama4ForConditionalGeneration

    source, saved = root / "llama4_multimodal", exported / "llama4_multimodal"
    model, info = Llama4ForConditionalGeneration.from_pretrained(saved, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    images = torch.randn(1, 3, 28, 28, generator=torch.Generator().manual_seed(1))
    old = Llama4ForConditionalGeneration.from_pretrained(source)
    with torch.no_grad():
        assert torch.equal(
            *(
                m.get_image_features(images, vision_feature_select_strategy="default").last_hidden_state
                for m in (old, model)
            )
        )


@pytest.mark.parametrize("kind", ["llama4", "llama4_multimodal"])
def test_llama4_has_its_attention_temperature_where_engines_look(kind, root, exported):
    from transformers import GenerationConfig

    assert not hasattr(GenerationConfig.from_pretrained(root / kind), "attn_temperature_tuning")
    found = GenerationConfig.from_pretrained(exported / kind)
    assert found.to_diff_dict()["attn_temperature_tuning"] is True and found.eos_token_id == 2


def test_the_text_part_runs_on_its_own(exported, expected):
    """The exported text weights in Llama4ForCausalLM: the logits of the whole model."""
    from transformers import Llama4ForCausalLM

    from megatron_scalerl.models import read_hf_config

    saved = exported / "llama4_multimodal"
    prefix = "language_model."
    weights = {k.removeprefix(prefix): v for k, v in whole(saved).items() if k.startswith(prefix)}
    model = Llama4ForCausalLM(read_hf_config(saved).text_config).eval()
    model.load_state_dict(weights)
    row = random_policies.rows()[1]
    first = row["cu_seqlens"][1]
    with torch.no_grad():
        logits = model(input_ids=row["tokens"][:, :first]).logits[0]
    assert torch.equal(logits, expected["llama4_multimodal"][:first])
