"""Megatron's options from recipe and family: what wins over what, and one clear line for a wrong key."""

import dataclasses
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from megatron.core.transformer import TransformerConfig
from transformers import LlamaConfig, Qwen3MoeConfig

from megatron_scalerl.distributed.parallel import Parallel
from megatron_scalerl.models import family
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.other_names import OF_OLD_MEGATRON
from megatron_scalerl.trainer import options
from megatron_scalerl.trainer.options import check_megatron, ddp_config, model_options, optimizer_config
from megatron_scalerl.trainer.ranks import init_parallel


def recipe(megatron=None, *, dtype="float32", world_size=1, optimizer=None, lora=None):
    return Recipe(
        name="options",
        steps=1,
        policy=dict(path="none", dtype=dtype, lora=lora),
        prompts=dict(path="none"),
        trainer=dict(world_size=world_size),
        optimizer=optimizer or {},
        megatron=megatron or {},
    )


def alone(pp_size=1):
    sizes = {f"{name}_size": 1 for name in ("tp", "ep", "etp", "dp", "cp")}
    ranks = {f"{name}_rank": 0 for name in ("tp", "pp", "ep", "etp", "dp", "cp")}
    return Parallel(rank=0, world_size=1, device=torch.device("cpu"), groups=None, pp_size=pp_size, **sizes, **ranks)


SIZES = dict(vocab_size=8, hidden_size=16, intermediate_size=32, num_hidden_layers=2)
SIZES |= dict(num_attention_heads=4, num_key_value_heads=2)


def llama():
    return family(LlamaConfig(**SIZES))


def mixture():
    sizes = SIZES | dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, head_dim=4)
    return family(Qwen3MoeConfig(**sizes, decoder_sparse_step=1))


def of_model(policy, given, **sections):
    """What the options of megatron.model make of a policy on one rank."""
    return model_options(policy(), recipe({"model": given}, **sections), alone())


def test_free_options_win_over_our_settings():
    given = dict(recompute_granularity="selective", layernorm_epsilon=1e-6, max_sequence_length=2048)
    options = of_model(llama, given)
    assert options.config.recompute_granularity == "selective"
    assert options.gpt["max_sequence_length"] == 2048 and options.gpt["share_embeddings_and_output_weights"] is False
    assert options.config.num_query_groups == 2 and options.config.normalization == "RMSNorm"


def test_every_option_of_megatron_core_stands_in_one_list():
    lists = [options.FREE, options.MODEL, options.UNUSED, options.ELSEWHERE, set(options.REFUSED)]
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    assert fields - set().union(*lists) == set()
    assert sum(map(len, lists)) == len(set().union(*lists))


ANOTHER_MODEL = dict(
    hidden_dropout=0.1,
    attention_dropout=0.1,
    num_layers=1,
    num_query_groups=4,
    kv_channels=8,
    layernorm_epsilon=1e-3,
    softmax_scale=1.0,
    no_rope_freq=2,
    rotary_interleaved=True,
    window_size=[64, 0],
    activation_func_clamp_value=1.0,
    moe_router_force_load_balancing=True,
    moe_router_topk=1,
    moe_router_topk_scaling_factor=2.0,
    moe_router_score_function="sigmoid",
    moe_expert_capacity_factor=1.0,
    moe_input_jitter_eps=0.01,
    position_embedding_type="none",
    rotary_base=500000,
)
AUXILIARY = "is not supported: Megatron-Core .* auxiliary loss, .* packing of rows"
REFUSED = [
    *((key, value, "another model than the policy's config.json") for key, value in ANOTHER_MODEL.items()),
    ("bf16", 2, "policy.dtype sets it"),
    ("params_dtype", 2, "policy.dtype sets it"),
    ("tensor_model_parallel_size", 2, "megatron.parallel sets it"),
    ("fp8", "hybrid", "is not supported: .* pickles"),
    ("moe_router_enable_expert_bias", True, "is not supported: .* export would lose"),
    ("mtp_num_layers", 1, "is not supported: .* export would lose it"),
    ("tp_comm_overlap", True, "is not supported"),
    *(
        ("moe_router_load_balancing_type", kind, AUXILIARY)
        for kind in ("aux_loss", "seq_aux_loss", ["aux_loss", "global_aux_loss"], "sinkhorn")
    ),
    ("moe_aux_loss_coeff", 1e-2, AUXILIARY),
    ("moe_aux_loss_coeff", [1e-2], AUXILIARY),
    ("moe_z_loss_coeff", 1e-3, AUXILIARY),
]


@pytest.mark.parametrize("key, value, line", REFUSED)
def test_what_would_train_another_model_or_count_wrong_in_silence_is_refused(key, value, line):
    with pytest.raises(ValueError, match=rf"megatron\.model\.{key}:? .*{line}"):
        of_model(mixture, {key: value})


def test_a_value_that_config_json_has_may_be_repeated():
    given = dict(num_layers=2, num_query_groups=2, moe_router_topk=2, hidden_dropout=0.0, moe_input_jitter_eps=None)
    assert of_model(mixture, given).config.moe_router_topk == 2


def test_bf16_sets_every_dtype():
    config = model_options(llama(), recipe(dtype="bfloat16"), alone()).config
    assert config.bf16 and config.params_dtype is torch.bfloat16 and config.pipeline_dtype is torch.bfloat16
    assert optimizer_config(recipe(dtype="bfloat16")).bf16


def test_the_precision_aware_optimizer_is_refused():
    with pytest.raises(ValueError, match=r"aware_optimizer is not supported: .* leave it out"):
        optimizer_config(recipe(dict(optimizer=dict(use_precision_aware_optimizer=True))))
    assert not optimizer_config(recipe()).use_precision_aware_optimizer


def test_fp32_is_refused_where_transformer_engine_makes_the_layers(monkeypatch):
    check_megatron(llama(), recipe())
    monkeypatch.setattr(options, "HAVE_TE", True)
    monkeypatch.setattr(options, "model_options", lambda *_: SimpleNamespace(config=options_of_plain_layers))
    options_of_plain_layers = SimpleNamespace(num_moe_experts=None)
    check_megatron(llama(), recipe(dtype="bfloat16"))
    with pytest.raises(
        ValueError, match=r"^policy\.dtype: .* set policy\.dtype=bfloat16, or MSRL_LAYERS=plain in the"
    ):
        check_megatron(llama(), recipe())


@pytest.mark.parametrize("given", [{}, {"gradient_accumulation_fusion": True}])
def test_with_te_the_accumulation_is_not_fused_in_the_output_layer(monkeypatch, given):
    monkeypatch.setattr(options, "HAVE_TE", True)
    monkeypatch.setattr(options, "_transformer_config", lambda settings: settings)
    assert of_model(llama, given).config["gradient_accumulation_fusion"] is False


def test_the_optimizer_section_reaches_adamw():
    section = dict(lr=3e-4, betas=(0.8, 0.9), eps=1e-15, weight_decay=0.02, clip_grad=0.5)
    config = optimizer_config(recipe(optimizer=section))
    found = (config.lr, config.adam_beta1, config.adam_beta2, config.adam_eps, config.weight_decay, config.clip_grad)
    assert found == (3e-4, 0.8, 0.9, 1e-15, 0.02, 0.5)
    assert config.use_distributed_optimizer and config.decoupled_weight_decay
    with pytest.raises(ValueError, match=r"megatron\.optimizer\.lr: the optimizer section"):
        optimizer_config(recipe(dict(optimizer=dict(lr=1.0))))


def test_gradients_are_reduced_in_fp32_and_overlapped_only_on_gpus():
    config = ddp_config(recipe())
    assert config.use_distributed_optimizer and config.grad_reduce_in_fp32
    if not torch.cuda.is_available():
        assert not config.overlap_grad_reduce and not config.overlap_param_gather
    assert not ddp_config(recipe(dict(ddp=dict(use_distributed_optimizer=False)))).overlap_param_gather


def test_a_world_that_cannot_be_cut_is_one_clear_line(monkeypatch):
    place = dict(RANK="0", WORLD_SIZE="3", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"world_size: 3 is not a multiple of 2, the expert tensor "):
        recipe(dict(parallel=dict(expert_model_parallel_size=2)), world_size=3)
    two = recipe(dict(parallel=dict(tensor_model_parallel_size=2)), world_size=2)
    three = two.with_settings(trainer={"world_size": 3})
    with pytest.raises(ValueError, match=r"world_size: 3 is not a multiple of 2, the tensor "):
        init_parallel(three)
    with pytest.raises(ValueError, match=r"trainer\.world_size: .* 1 ranks, .* is 3"):
        init_parallel(recipe())
    monkeypatch.delenv("MASTER_PORT")
    with pytest.raises(ValueError, match=r"environment: MASTER_PORT is not set; .*RANK"):
        init_parallel(recipe(world_size=3))


def test_an_interleaved_pipeline_is_refused_on_cpus(monkeypatch):
    monkeypatch.setattr("megatron_scalerl.distributed.device.HAVE_GPU", False)
    parallel = dict(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2)
    with pytest.raises(ValueError, match=r"virtual_pipeline_model_parallel_size: 2 needs a GPU"):
        init_parallel(recipe(dict(parallel=parallel), world_size=2))


def test_pipelines_exchange_rows_of_any_length_and_with_context_parallelism_no_others():
    assert not of_model(llama, {}).config.variable_seq_lengths
    place = replace(alone(pp_size=2), cp_size=2)
    for pipeline in (alone(pp_size=2), place):
        assert model_options(llama(), recipe(), pipeline).config.variable_seq_lengths
    given = recipe(dict(model=dict(variable_seq_lengths=False)))
    assert not model_options(llama(), given, alone(pp_size=2)).config.variable_seq_lengths
    with pytest.raises(ValueError, match=r"megatron.model.variable_seq_lengths: .* true"):
        model_options(llama(), given, place)


@pytest.mark.parametrize("policy", [llama, mixture])
def test_an_auxiliary_loss_that_is_off_is_no_mistake(policy):
    off = {"moe_router_load_balancing_type": "none", "moe_aux_loss_coeff": 0, "moe_z_loss_coeff": None}
    config = of_model(policy, off).config
    assert not config.moe_aux_loss_coeff and not config.moe_z_loss_coeff


def test_layers_without_adapters_are_refused_with_adapters(monkeypatch):
    for key in options._WITHOUT_ADAPTERS:
        with pytest.raises(ValueError, match=f"megatron.model.{key}: .*policy.lora"):
            of_model(mixture, {key: True}, lora={})
    experts = dict(targets=["gate_proj", "down_proj"])
    of_model(llama, {}, lora=experts)
    with pytest.raises(ValueError, match=r"policy\.lora\.targets: gate_proj, down_proj .*q_proj"):
        of_model(mixture, {}, lora=experts)
    of_model(mixture, {}, lora=dict(targets=["o_proj", "down_proj"]))
    latent = replace(llama(), transformer={**llama().transformer, "multi_latent_attention": True})
    with pytest.raises(ValueError, match=r"policy\.lora: .*latent"):
        model_options(latent, recipe(lora={}), alone())
    grouped = {**options._device_settings(), "moe_grouped_gemm": True}
    monkeypatch.setattr(options, "_device_settings", lambda: grouped)
    assert of_model(mixture, {}).config.moe_grouped_gemm
    assert not of_model(mixture, {}, lora={}).config.moe_grouped_gemm


@pytest.mark.parametrize("key", sorted(OF_OLD_MEGATRON))
def test_an_option_that_has_left_says_what_to_do(key):
    _, section, name = key.split(".")
    with pytest.raises(ValueError, match=f"{key} exists only in Megatron-Core 0.16; delete the key"):
        check_megatron(llama(), recipe({section: {name: False}}))
