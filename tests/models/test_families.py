"""Families without Megatron: rotary frequencies, the weight map cut and put together again, refusals."""

import pytest
import torch
from family_configs import (
    CONFIGS,
    DEEPSEEK,
    FLASH,
    GLM,
    LLAMA,
    LLAMA4,
    MINIMAX,
    OLMOE,
    QWEN3_MOE,
    as_published,
    experts_apart,
    family_of,
    shard_of,
)
from refusals import refused
from transformers import (
    DeepseekV3Config,
    Ernie4_5Config,
    Exaone4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiniMaxM2Config,
    MistralConfig,
    OlmoeConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
)

from megatron_scalerl.checkpoints.hf_folder import family_of_folder
from megatron_scalerl.models import FAMILIES, family, read_hf_config
from megatron_scalerl.models.adapters import adapter_family
from megatron_scalerl.models.family import check_layout, padded_vocab_size
from megatron_scalerl.models.llama4 import attention_temperature
from megatron_scalerl.recipe.sections import PROJECTIONS

YARN = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("kind", CONFIGS)
def test_shards_put_together_are_the_checkpoint(kind, size, adapters):
    """Every element of every tensor lies in exactly one piece, and comes back where it was."""
    found = family_of(kind)
    if adapters:
        found = adapter_family(found, rank=3, targets=PROJECTIONS)
    generator = torch.Generator().manual_seed(1)
    shapes = {name: shape for rule in found.rules for name, shape in rule.hf_shapes.items()}
    source = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    back = {name: torch.full(shape, float("nan")) for name, shape in shapes.items()}
    visits = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for rule in found.rules:
        for rank in range(size):
            shard = shard_of(rule, rank, size, source)
            if rule.exported and (rule.sharded or rank == 0):
                for piece in rule.pieces(rank, size):
                    back[piece.hf_name][piece.hf_index] = piece.of_shard(shard)
                    visits[piece.hf_name][piece.hf_index] += 1
    for name in source:
        assert torch.equal(back[name], source[name]), name
        assert torch.equal(visits[name], torch.ones_like(visits[name])), name


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if "deepseek" not in kind])  # refused with adapters
def test_every_linear_layer_but_head_and_router_has_an_adapter(kind):
    """By PEFT's names and shapes; experts have those of separate linear layers, also where they are one tensor."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(CONFIGS[kind]())
    layers = {name: tuple(m.weight.shape) for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    layers = {name: shape for name, shape in layers.items() if not name.endswith(("lm_head", "router"))}
    for name, module in model.named_modules():
        if name.endswith(".experts"):
            sizes = dict(gate_proj=(20, 24), up_proj=(20, 24), down_proj=(24, 20))
            layers |= {f"{name}.{e}.{p}": s for e in range(len(module.down_proj)) for p, s in sizes.items()}
    expected = {}
    for usual, (out, inputs) in layers.items():
        name = as_published(model.config.model_type, usual)
        expected[f"base_model.model.{name}.lora_A.weight"] = (3, inputs)
        expected[f"base_model.model.{name}.lora_B.weight"] = (out, 3)
    adapters = adapter_family(family_of(kind), rank=3, targets=PROJECTIONS)
    assert {name: shape for rule in adapters.rules for name, shape in rule.hf_shapes.items()} == expected
    some = adapter_family(family_of(kind), rank=3, targets=["v_proj"])
    assert {name.split(".")[-3] for rule in some.rules for name in rule.hf_shapes} == {"v_proj"}


def test_query_key_value_rows_are_grouped():
    """Two groups of two heads of one row each: Megatron's rows are q0 q1 k0 v0 q2 q3 k1 v1."""
    config = LlamaConfig(**{**LLAMA, "head_dim": 2, "num_attention_heads": 4})
    rule = next(r for r in family(config).rules if r.megatron.endswith("layers.0.self_attention.linear_qkv.weight"))
    order = [(p.hf_name.split(".")[-2][0], p.hf_index[0].start, p.start, p.stop) for p in rule.pieces(0, 1)]
    assert order == [
        ("q", 0, 0, 4),
        ("k", 0, 4, 6),
        ("v", 0, 6, 8),
        ("q", 4, 8, 12),
        ("k", 2, 12, 14),
        ("v", 2, 14, 16),
    ]


@pytest.mark.parametrize("kind", CONFIGS)
def test_names_are_those_of_hugging_face(kind):
    """Names and shapes of transformers' own module; some families' experts in their checkpoints' layout."""
    from transformers import AutoModelForCausalLM

    config = CONFIGS[kind]()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = list(model.named_parameters())
    tensors += [(name, b) for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")]
    if not kind.endswith("fused"):
        tensors = experts_apart(config.model_type, tensors)
    found = {name: shape for rule in family_of(kind).rules for name, shape in rule.hf_shapes.items()}
    assert found == {name: tuple(tensor.shape) for name, tensor in tensors}


def test_a_fused_expert_is_cut_as_it_is_stored():
    """Expert 3 of a [4, 40, 24] tensor on the second of two ranks: gate rows 10 to 20, up rows 30 to 40."""
    name = "decoder.layers.1.mlp.experts.local_experts.3.linear_fc1.weight"
    rule = next(r for r in family_of("qwen3_moe fused").rules if r.megatron == name)
    assert rule.hf_shapes == {"model.layers.1.mlp.experts.gate_up_proj": (4, 40, 24)} and rule.expert == 3
    gate, up = rule.pieces(1, 2)
    assert (gate.hf_index[:2], gate.start, gate.stop) == ((3, slice(10, 20)), 0, 10)
    assert (up.hf_index[:2], up.start, up.stop) == ((3, slice(30, 40)), 10, 20)
    assert not gate.transposed and not up.transposed


def test_a_folder_says_how_its_experts_are_stored(tmp_path):
    """Neither the config nor transformers' module does."""
    from safetensors.torch import save_file

    CONFIGS["qwen3_moe fused"]().save_pretrained(tmp_path)
    name = "model.layers.1.mlp.experts.{}"
    for stored in (None, "0.up_proj.weight", "gate_up_proj"):
        if stored:
            save_file({name.format(stored): torch.zeros(1)}, tmp_path / "model.safetensors")
        found = {n: shape for rule in family_of_folder(tmp_path).rules for n, shape in rule.hf_shapes.items()}
        fused = stored == "gate_up_proj"
        assert found.get(name.format("gate_up_proj")) == ((4, 40, 24) if fused else None)
        assert found.get(name.format("0.up_proj.weight")) == (None if fused else (20, 24))


def test_qwen3_moe_layers_mix_as_in_the_config():
    """mlp_only_layers wins over decoder_sparse_step, which counts from 1."""
    deep = {**QWEN3_MOE, "num_hidden_layers": 6}
    found = family(Qwen3MoeConfig(**deep, decoder_sparse_step=2, mlp_only_layers=[3]))
    assert found.transformer["moe_layer_freq"] == [0, 1, 0, 0, 0, 1]
    assert [style.moe for style in found.layers] == [False, True, False, False, False, True]
    assert {style.qk_norm for style in found.layers} == {"weighted"} and found.transformer["qk_layernorm"] is True
    assert family(Qwen3MoeConfig(**QWEN3_MOE, norm_topk_prob=True)).transformer["moe_router_pre_softmax"] is False
    assert found.transformer["moe_router_pre_softmax"] is True
    dense = family(Qwen3MoeConfig(**QWEN3_MOE, mlp_only_layers=[0, 1]))
    assert "num_moe_experts" not in dense.transformer


def test_llama4_layers_differ_as_in_the_config():
    """Every fourth layer has no RoPE and no query-key norm and sees the whole sequence."""
    found = family(Llama4TextConfig(**LLAMA4))
    assert [style.moe for style in found.layers] == [False, True, False, True]
    assert [style.rope for style in found.layers] == [True, True, True, False]
    assert [style.qk_norm for style in found.layers] == ["weightless", "weightless", "weightless", "none"]
    assert [style.chunked for style in found.layers] == [True, True, True, False]
    assert found.transformer["no_rope_freq"] == [0, 0, 0, 1]
    assert found.attention_chunk_size == 8192


def test_attention_temperature_by_hand():
    """1 + 0.1 ln(1 + floor((p + 1) / 8)): 1 up to position 6, then steps."""
    scale = attention_temperature(torch.tensor([0, 6, 7, 14, 15]), floor_scale=8.0, attn_scale=0.1)
    assert scale.tolist() == pytest.approx([1.0, 1.0, 1.0693147, 1.0693147, 1.1098612])


def test_a_vision_model_carries_its_tower():
    from transformers import Llama4Config

    found = family(Llama4Config(text_config=Llama4TextConfig(**LLAMA4)))
    assert found.passthrough == ("vision_model.", "multi_modal_projector.")
    assert found.rules[0].hf_shapes == {"language_model.model.embed_tokens.weight": (37, 24)}


@pytest.mark.parametrize("rank, rows", [(0, (0, 19)), (1, (19, 37))])
def test_the_vocabulary_is_padded_to_the_ranks(rank, rows):
    assert padded_vocab_size(37, 2) == 38 and padded_vocab_size(38, 2) == 38
    piece = family(CONFIGS["llama"]()).rules[0].pieces(rank, 2)[0]
    assert (piece.hf_index[0].start, piece.hf_index[0].stop) == rows


BASES = {
    LlamaConfig: LLAMA,
    Qwen2Config: LLAMA,
    Qwen3Config: LLAMA,
    MistralConfig: LLAMA,
    Qwen3MoeConfig: QWEN3_MOE,
    Llama4TextConfig: LLAMA4,
    DeepseekV3Config: DEEPSEEK,
    Glm4MoeLiteConfig: FLASH,
    Glm4MoeConfig: GLM,
    MiniMaxM2Config: MINIMAX,
    OlmoeConfig: OLMOE,
    Exaone4Config: LLAMA,
    Ernie4_5Config: LLAMA,
    SmolLM3Config: LLAMA,
}
FP8 = {"quantization_config": {"quant_method": "fp8"}}


@pytest.mark.parametrize(
    "kind, keys, line",
    [
        (LlamaConfig, {"mlp_bias": True}, "config.json: mlp_bias: True is not supported, only False"),
        (Qwen2Config, {"attention_bias": True}, "config.json: attention_bias: True is not supported, only False"),
        (
            Qwen2Config,
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0},
            "config.json: use_sliding_window: True is not supported, only False",
        ),
        (LlamaConfig, {"sliding_window": 8}, "config.json: sliding_window: 8 is not supported, only None or 0"),
        (LlamaConfig, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported for llama"),
        (Glm4MoeConfig, {"rope_parameters": {**YARN}}, "partial_rotary_factor: 0.5 is not supported .* with yarn"),
        (Glm4MoeConfig, {"n_group": 4, "topk_group": 2}, "num_experts_per_tok: 2 experts from 2 groups"),
        (Glm4MoeLiteConfig, {"first_k_dense_replace": 2}, "first_k_dense_replace has to be 1"),
        (Glm4MoeLiteConfig, {"mlp_layer_types": ["sparse", "dense"]}, "mlp_layer_types: .* is not supported"),
        (MiniMaxM2Config, {"use_routing_bias": False}, "use_routing_bias has to be True"),
        (MiniMaxM2Config, {"partial_rotary_factor": 0.75}, "rotary_dim has to be 6"),
        (OlmoeConfig, {"rms_norm_eps": 1e-6}, "rms_norm_eps: 1e-06 is not supported, only 1e-05"),
        (Exaone4Config, {"sliding_window": 8}, "sliding_window: 8 is not supported, only None"),
        (Ernie4_5Config, {"use_bias": True}, "use_bias: True is not supported"),
        (LlamaConfig, {"quantization_config": {"quant_method": "awq"}}, r"\(awq\); take the bf16 release from"),
        (Qwen3Config, {"is_causal": False}, "config.json: is_causal: False is not supported, only True"),
        (Qwen2Config, FP8, r"config.json: the weights are quantized \(fp8\); take the policy's bf16 release"),
        (MistralConfig, {}, "config.json: sliding_window: 4096 is not supported, only None or 0"),
        (
            Qwen3Config,
            {"use_sliding_window": True, "max_window_layers": 1},
            "use_sliding_window: True is not supported, only False",
        ),
        (
            Qwen3Config,
            {"layer_types": ["full_attention", "sliding_attention"]},
            "layer_types: found full_attention, sliding_attention; ",
        ),
        (
            Qwen3MoeConfig,
            {"num_experts_per_tok": 1, "norm_topk_prob": True},
            "num_experts_per_tok: 1 is too few: the normalized",
        ),
        (Llama4TextConfig, {"num_experts_per_tok": 2}, "num_experts_per_tok: 2 is not supported, only 1"),
        (
            Llama4TextConfig,
            {"rope_parameters": YARN},
            "rope_type: 'yarn' is not supported for a policy in which",
        ),
        (
            SmolLM3Config,
            {"rope_parameters": YARN, "no_rope_layers": [1, 0]},
            "'yarn' is not supported for a policy in",
        ),
        (
            SmolLM3Config,
            {"no_rope_layers": [1], "layer_types": ["full_attention"] * 2},
            "no_rope_layers has 1 entries",
        ),
        (SmolLM3Config, {"final_logit_softcapping": 30.0}, "final_logit_softcapping: 30.0 is not supported"),
        (LlamaConfig, {"qkv_bias": True}, "qkv_bias: True is not supported"),
        (
            LlamaConfig,
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "rope_dim": 2}},
            "rope_dim: eng",
        ),
        (Glm4MoeLiteConfig, {"moe_layer_freq": 2}, "moe_layer_freq: 2 is not supported, only 1"),
        *(
            (DeepseekV3Config, keys, line)
            for keys, line in (
                ({"rope_interleave": False}, "rope_interleave: False is not supported"),
                ({"norm_topk_prob": False}, "norm_topk_prob: False is not supported"),
                ({"scoring_func": "softmax"}, "scoring_func .*'sigmoid'"),
                ({"topk_method": None}, "topk_method .*'noaux_tc'"),
                ({"num_experts_per_tok": 1}, "num_experts_per_tok: 1 is too few"),
                ({"n_group": 4, "topk_group": 2}, "num_experts_per_tok: 2 experts from 2 groups"),
                (FP8, r"are quantized \(fp8\)"),
                ({"rope_parameters": YARN | {"mscale": 1.0}}, "rope_scaling: set both mscale and mscale_all_dim"),
                ({"rope_parameters": YARN | {"attention_factor": 1.0}}, "attention_factor"),
                ({"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 0}}, "mscale and mscale_all_dim"),
                ({"rope_parameters": YARN | {"truncate": False}}, "rope_scaling: truncate"),
                ({"rope_parameters": YARN | {"rope_type": "linear"}}, "rope_scaling: 'linear'"),
                ({"rope_parameters": YARN | {"factor": None}}, "rope_scaling: 'yarn' .* factor"),
                ({"head_dim": 2}, "head_dim: 2 is not supported, only 4"),
                ({"tie_word_embeddings": True}, "tie_word_embeddings: True is not supported"),
                ({"index_topk": 64}, "index_topk: 64 is not supported"),
                ({"num_experts_per_tok": None}, "num_experts_per_tok has to be at least 1"),
                ({"n_group": 4, "topk_group": None}, "topk_group has to be at least 1"),
            )
        ),
    ],
)
def test_what_the_map_does_not_cover_is_refused(kind, keys, line):
    with refused(line):
        family(kind(**BASES[kind] | keys))


def test_other_unknown_keys_change_nothing():
    """Published files have many."""
    plain, more = (family(LlamaConfig(**LLAMA, **keys)) for keys in ({}, {"unsloth_fixed": True, "qk_norm": False}))
    assert (plain.transformer, plain.layers) == (more.transformer, more.layers)
    assert [rule.megatron for rule in plain.rules] == [rule.megatron for rule in more.rules]


KNOWN = f"supported are {', '.join(FAMILIES)}; docs/families.md says how to add a family"


def test_unknown_and_broken_configs_are_one_line(tmp_path):
    unknown = PretrainedConfig()
    unknown.model_type = "mamba"
    with refused(rf"'mamba' is not supported: the model has state-space layers \(mamba\); {KNOWN}"):
        family(unknown)
    path = tmp_path / "config.json"
    for text, line in (
        (
            '{"model_type": "new", "layer_types": 5}',
            rf"'new' is not supported: the model has modules that have not been compared .*; {KNOWN}",
        ),
        ('{"model_type": "new", "own": 0}', rf"'new' is not supported: the model has the keys own; {KNOWN}"),
        ('{"own": 1}', rf"model_type None is not supported: the model has the keys own; {KNOWN}"),
        ("[]", r"config.json: the file has to hold a JSON object, not a list"),
        *(
            (text % 10**9, r"config.json: \w+: 1,000,000,000 is too large; at most 10,000 are accepted")
            for text in (
                '{"model_type": "llama", "num_hidden_layers": %d}',
                '{"model_type": "qwen3_moe", "num_experts": %d}',
                '{"model_type": "llama4", "text_config": {"num_local_experts": %d}}',
            )
        ),
        ('{"model_type": "llama", "num_attention_heads": 0}', "num_attention_heads: 0 is too small"),
        ('{"model_type": "llama", "rope_scaling": {"type": "yarn"}}', "Missing required keys .*'yarn': {'factor'}"),
        ('{"model_type": "llama", "architectures": ["Qwen2ForCausalLM"]}', "'llama' means LlamaForCausalLM"),
        ("{", r"config.json: the file is not valid JSON: Expecting property name"),
        ('{"model_type": "llama4_text", "attn_temperature_tuning": 4}', r"attn_temperature_tuning.* expected bool"),
    ):
        path.write_text(text)
        with refused(line):
            read_hf_config(tmp_path)


def test_a_long_context_is_no_number_of_parts(tmp_path):
    path = tmp_path / "config.json"
    path.write_text('{"model_type": "llama", "num_hidden_layers": 2, "n_positions": 131072}')
    assert read_hf_config(tmp_path).num_hidden_layers == 2


@pytest.mark.parametrize(
    "kind, sizes, line",
    [
        ("llama", dict(tp_size=4), r"tensor_model_parallel_size: 2 key-value heads cannot be divided by 4"),
        ("qwen3_moe", dict(ep_size=3), r"expert_model_parallel_size: 4 experts cannot be divided by 3"),
        ("qwen3_moe", dict(etp_size=8), r"expert_tensor_parallel_size: 20 expert MLP columns cannot be divided by 8"),
    ],
)
def test_parallel_sizes_divide_what_they_cut(kind, sizes, line):
    with refused(line):
        check_layout(family_of(kind), **sizes)
    check_layout(family_of(kind), tp_size=2)
    rule = next(rule for rule in family_of(kind).rules if rule.megatron.endswith("linear_qkv.weight"))
    with refused(r"num_key_value_heads: 2 is not a multiple of the parallel size 4"):
        rule.pieces(0, 4)


def test_layers_of_multi_token_prediction_are_outside_the_policy():
    """As many as the config says, after the others; the router's bias is no parameter of one."""
    found = family(DeepseekV3Config(**DEEPSEEK | {"num_nextn_predict_layers": 2}))
    assert found.passthrough[:2] == ("model.layers.2.", "model.layers.3.") and found.untrained % 2 == 0
    tables = tuple(f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2))
    assert family(DeepseekV3Config(**DEEPSEEK)).passthrough == found.passthrough[2:] == tables
    assert found.frozen == {"model.layers.1.mlp.gate.e_score_correction_bias"}
    one = {"num_nextn_predict_layers": 1}
    for config in (Glm4MoeConfig(**GLM | one), Glm4MoeLiteConfig(**FLASH | one)):
        assert family(config).passthrough[0] == "model.layers.2." and family(config).untrained > 0
