"""A PEFT folder to start from: it has to hold the adapters of the recipe, and no others."""

import json
import logging
import shutil

import pytest
import random_policies
import torch
from adapter_folders import save_adapter
from command_line import command
from family_configs import CONFIGS, family_of
from recipe_files import ROOT

from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.recipe.sections import LoraSection, PolicySection
from megatron_scalerl.trainer.adapter_folder import adapter_reader

HEAD = "base_model.model.lm_head.lora_A.weight"
Q_PROJ = "base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight"
TARGETS = ["q_proj", "down_proj"]
LORA = LoraSection(rank=2, alpha=8.0, targets=TARGETS)
READ = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj"], "exclude_modules": ["down_proj"]}
"""Keys that are compared with policy.lora or with the tensors -> a value that differs from them."""
IGNORED = {
    "auto_mapping": {"base_model_class": "Qwen2ForCausalLM", "parent_library": "transformers.models.qwen2"},
    "base_model_name_or_path": "another/name",
    "corda_config": {"corda_method": "kpm"},
    "ensure_weight_tying": True,
    "eva_config": {"rho": 2.0},
    "fan_in_fan_out": True,
    "inference_mode": True,
    "loftq_config": {"loftq_bits": 4},
    "lora_dropout": 0.1,
    "lora_ga_config": {"direction": "ArB2r"},
    "megatron_config": {"hidden_size": 24},
    "megatron_core": "megatron.core.other",
    "peft_version": "0.99.0",
    "qalora_group_size": 8,
    "revision": "abc",
    "runtime_config": {"ephemeral_gpu_offload": True},
    "velora_config": {"num_groups": 2},
}
REFUSED = {
    "alora_invocation_tokens": [5, 6],
    "alpha_pattern": {"q_proj": 4},
    "arrow_config": {"top_k": 3},
    "bias": "lora_only",
    "init_lora_weights": "pissa",
    "kasa_config": {"beta": 1e-4},
    "layer_replication": [[0, 2], [1, 2]],
    "layers_pattern": "blocks",
    "layers_to_transform": 0,
    "lora_bias": True,
    "modules_to_save": ["lm_head"],
    "monteclora_config": {"num_samples": 2},
    "peft_type": "ADALORA",
    "rank_pattern": {"q_proj": 4},
    "target_parameters": ["mlp.experts.gate_up_proj"],
    "task_type": "SEQ_CLS",
    "trainable_token_indices": [0],
    "use_bdlora": {"target_modules_bd_a": ["o_proj"]},
    "use_dora": True,
    "use_qalora": True,
    "use_rslora": True,
}


def folder(path, **changes):
    """(policy section, the family of its adapters) for a PEFT folder of these at `path`."""
    adapters = save_adapter(path, family_of("qwen2"), LORA, **changes)
    return PolicySection(path="models/base", lora=LORA, adapter=str(path)), adapters


def factor(value, dtype=torch.float32):
    """The factor of Q_PROJ, one of whose numbers is `value`."""
    return {Q_PROJ: torch.zeros(2, 24, dtype=dtype).index_fill(1, torch.tensor([5]), value)}


FOLDERS = [
    *(({key: value}, f"{key}") for key, value in (READ | REFUSED).items()),
    *(({key: value}, None) for key, value in IGNORED.items()),
    # a key that is off
    *(
        ({key: value}, None)
        for key in ("alora_invocation_tokens", "layers_to_transform", "a_key_of_tomorrow")
        for value in (None, False, [], {}, "")
    ),
    *(
        ({"a_key_of_tomorrow": value}, r"adapter_config\.json: a_key_of_tomorrow is")
        for value in (True, 0, 0.5, "x", [0], {"a": None})
    ),
    # a scale that is missing or no number
    *(
        ({key: value}, rf"adapter_config\.json: {key} is")
        for key, value in (("r", None), ("lora_alpha", None), ("lora_alpha", float("nan")), ("peft_type", None))
    ),
    # first values beside the base, and those that replace a part of it
    *(({"init_lora_weights": start}, None) for start in (None, True, False, "gaussian", "eva", "orthogonal")),
    *(({"init_lora_weights": start}, "init_lora_weights is") for start in ("pissa_niter_4", "of_tomorrow", [])),
    # modules that name every tensor, and those that leave one out
    (dict(target_modules=["q_proj", "mlp.down_proj"]), None),
    (dict(target_modules=["model.layers.0.mlp.down_proj", "q_proj", "1.mlp.down_proj"]), None),
    (dict(target_modules="all-linear", exclude_modules=["lm_head", "x.q_proj"]), None),
    (dict(target_modules=r".*\.(q|down)_proj"), None),
    (dict(target_modules=["proj"]), "exclude_modules"),
    (dict(target_modules=["q_proj", "layers.0.mlp.down_proj"]), "exclude_modules"),
    (dict(exclude_modules=["layers.1.self_attn.q_proj"]), "exclude_modules"),
    (dict(exclude_modules=".*q_proj"), "exclude_modules"),
    # other layers
    (dict(drop=[Q_PROJ]), f"policy.lora.targets .*{Q_PROJ}"),
    (dict(change={HEAD: torch.zeros(1)}), f"policy.lora.targets .*{HEAD}"),
    # factors that cannot be computed with
    *(
        (dict(change=factor(value, dtype)), rf"{Q_PROJ}: the factor has NaN or Inf")
        for value in (float("nan"), float("inf"), -float("inf"))
        for dtype in (torch.float32, torch.bfloat16, torch.float16)
    ),
    (
        dict(change={Q_PROJ: torch.zeros(2, 32)}, base_model_name_or_path="org/base"),
        rf"{Q_PROJ}: .*shape is \[2, 32\], .* \[2, 24\]; .* org/base",
    ),
    (dict(change=factor(0.0, torch.float64)), f"{Q_PROJ}: .*F64"),
]
"""Changes of a folder, and the line with which it is refused; None: it is read."""


@pytest.mark.parametrize("changes, line", FOLDERS)
def test_a_folder_is_read_or_refused_in_a_line(tmp_path, changes, line):
    given = folder(tmp_path, **changes)
    if line is None:
        assert adapter_reader(*given).read(Q_PROJ, (slice(0, 2), slice(0, 5)), (2, 24)).shape == (2, 5)
        return
    with pytest.raises(ValueError, match=rf"^policy\.adapter: .*{line}"):
        adapter_reader(*given)


def test_the_table_has_every_key_of_this_peft():
    config = pytest.importorskip("peft").LoraConfig
    assert config.__dataclass_fields__.keys() == READ.keys() | IGNORED.keys() | REFUSED.keys()


@pytest.mark.slow
def test_peft_itself_computes_the_same_whatever_an_ignored_key_says(tmp_path):
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=2, lora_alpha=8, target_modules=TARGETS, init_lora_weights=False)
    base = random_policies.make("qwen2", tmp_path / "policy", num_hidden_layers=2)
    tokens = torch.arange(3, 20)[None]
    without = base(tokens).logits
    adapted = peft.get_peft_model(base, settings).eval()
    expected = adapted(tokens).logits
    assert (expected - without).abs().max() > 1e-3
    adapted.save_pretrained(tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_config.json"
    saved = json.loads(file.read_text())
    for key, value in IGNORED.items():
        file.write_text(json.dumps(saved | {key: value}))
        base = random_policies.make("qwen2", tmp_path / "again", num_hidden_layers=2)
        loaded = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        assert torch.equal(loaded(tokens).logits, expected), key


@pytest.mark.parametrize("text", [None, "{", "[]", "null", "[" * 100_000])
def test_a_folder_without_a_configuration_is_refused(tmp_path, text):
    if text is not None:
        (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"adapter_config\.json: the file is not a valid PEFT configuration"):
        adapter_reader(PolicySection(path="p", lora=LORA, adapter=str(tmp_path)), family_of("qwen2"))


@pytest.mark.parametrize(
    "base, policy, same",
    [
        ("Qwen/Qwen3-8B", "/data/models/qwen3-8b/", True),
        ("/a/b/policy", "policy", True),
        ("Qwen/Qwen3-8B", "/cache/models--Qwen--Qwen3-8B/snapshots/0a1b", True),
        ("/cache/models--Qwen--Qwen3-8B/snapshots/0a1b", "/cache/models--Qwen--Qwen3-8B/snapshots/0a1b", True),
        ("Qwen/Qwen3-8B", "/data/models/Qwen3-8B-Base", False),
        (None, "Qwen3-8B", True),
        ("Qwen/Qwen3-8B", "/cache/models--Qwen--Qwen3-4B/snapshots/0a1b", False),
    ],
)
def test_another_base_is_said_by_its_name(tmp_path, base, policy, same, caplog):
    section, adapters = folder(tmp_path, base_model_name_or_path=base)
    adapter_reader(section.model_copy(update={"path": policy}), adapters)
    said = [record.getMessage() for record in caplog.records]
    assert [base in line and policy in line for line in said] == ([] if same else [True])


@pytest.fixture
def recipe(tmp_path):
    """A recipe of a tiny policy, of which its config.json is there, with an adapter."""
    config = CONFIGS["qwen2"]()
    config.architectures = ["Qwen2ForCausalLM"]
    config.save_pretrained(tmp_path / "configs" / "base")
    file = tmp_path / "recipe.yaml"
    lora = f"{{rank: 2, alpha: 8, targets: [{', '.join(TARGETS)}]}}"
    file.write_text(
        f"name: r\nsteps: 1\nprompts: {{path: p.jsonl, max_prompt_tokens: 64}}\n"
        f"interruption: {{enabled: false, thinking_tokens: [8, 8], answer_tokens: 8}}\n"
        f"policy: {{path: models/base, dtype: float32, lora: {lora}, adapter: {tmp_path / 'adapter'}}}\n"
    )
    return file


def test_a_plan_compares_the_adapter_with_the_recipe(recipe, tmp_path, capsys, caplog):
    plan = ["plan", str(recipe), "--gpus", "2", "--check", "--no-build"]
    folder(tmp_path / "adapter", base_model_name_or_path="org/another")
    with caplog.at_level(logging.WARNING):
        assert command(plan[0])(plan[1:]) == 0
    [warning] = [record.getMessage() for record in caplog.records if "policy.adapter" in record.getMessage()]
    assert "org/another" in warning and "models/base" in warning
    folder(tmp_path / "adapter", r=4)
    capsys.readouterr()
    assert command(plan[0])(plan[1:]) == 2
    assert "r is 4, but policy.lora sets 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "key, own",
    [
        ("policy.lora.r=16", "policy.lora.rank"),
        ("policy.lora.lora_alpha=16", "policy.lora.alpha"),
        ("policy.lora.target_modules=[q_proj]", "policy.lora.targets"),
        ("policy.lora_rank=16", "policy.lora.rank"),
    ],
)
def test_names_of_peft_name_the_keys_here(recipe, key, own):
    with pytest.raises(ValueError, match=rf"is not a recipe key; it is set by {own}$"):
        load_recipe(recipe, [key])


COMMANDS = {
    "init": "--policy {adapter} --data {tiny}/prompts.jsonl --gpus 0 --out {out}/r.yaml",
    "train": "{recipe} policy.path={adapter}",
    "sft": "{recipe} policy.path={adapter} --out {out}/sft",
    "prompts": "{recipe} policy.path={adapter}",
    "study": "{recipe} --seeds 1 --out {out}/study --set policy.path={adapter}",
    "submit": "{recipe} --dry-run --partition p --time 1:00:00 policy.path={adapter}",
    "plan": "{recipe} --gpus 2 --check policy.path={adapter}",
    "plan --config": "{recipe} --gpus 2 --check --config {adapter}",
    "evaluate": "{adapter} --data {tiny}/held_out.jsonl:prompt,answer --out {out}/evaluated",
    "convert to-megatron": "{adapter} {out}/megatron",
    "convert to-hf": "{tiny} {out}/hf --like {adapter}",
    "convert verify": "{adapter} {tiny}/base_policy",
    "doctor": "{recipe} policy.path={adapter}",
}
"""Commands that take a policy -> their words."""


@pytest.mark.parametrize("with_config", [False, True])
@pytest.mark.parametrize("name", COMMANDS)
def test_an_adapter_in_the_place_of_a_policy_is_called_one(name, with_config, tiny, tmp_path, capsys):
    adapter = tmp_path / "adapter"
    folder(adapter, base_model_name_or_path="org/base")
    if with_config:
        shutil.copy(tiny / "base_policy" / "config.json", adapter)
    recipe = ROOT / "recipes" / "tiny_cpu.yaml"
    words = COMMANDS[name].format(adapter=adapter, tiny=tiny, out=tmp_path, recipe=recipe).split()
    first, *more = name.split()
    files = [f"prompts.path={tiny}/prompts.jsonl", f"prompts.held_out_path={tiny}/held_out.jsonl"]
    if str(recipe) in words and name != "study":
        words += [f"output_dir={tmp_path}", *files]
    code = command(first)([*(word for word in more if word[0] != "-"), *words])
    captured = capsys.readouterr()
    said = " ".join((captured.out + captured.err).split())
    assert code or name == "submit", said  # a dry run goes on, on a host without the policy
    assert f"{adapter}: the folder holds an adapter" in said
    assert "merge the adapter into org/base" in said and "policy.lora={rank: 2, alpha: 8.0}" in said
