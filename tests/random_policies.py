"""Random policies of every family as Hugging Face folders, what engines need of them, and fixed packed rows for them.

Their weights are large, so that logits reach 5 to 20 and an error in any layer changes them visibly.
"""

from functools import partial
from itertools import pairwise

import torch

VOCAB = 65
"""Odd, so that two tensor-parallel ranks need a padded row."""

ROWS = ((5, 17, 31, 24), (40, 9, 20, 12))
"""Sequence lengths of the two micro-batches."""
FOR_ENGINES = dict(head_dim=32, vocab_size=64)
"""Settings that vLLM on CPUs can serve, with the vocabulary of the tiny tokenizer."""
QWEN2_FOR_ENGINES = dict(num_attention_heads=2, num_key_value_heads=1, vocab_size=64)
"""vLLM's Qwen2 has heads of hidden size / heads: 32, too."""
LATENT_FOR_ENGINES = dict(
    kv_lora_rank=512,
    qk_rope_head_dim=64,
    qk_nope_head_dim=32,
    v_head_dim=32,
    moe_intermediate_size=64,
    vocab_size=64,
    std=0.15,
)
"""vLLM decodes latent attention on CPUs with 512 + 64 numbers alone, and its experts come in blocks of 32. Larger
weights would round sums over 512 numbers by 1e-4."""
LATENT_ON_GPUS = dict(kv_lora_rank=512, qk_rope_head_dim=64, qk_nope_head_dim=128, v_head_dim=128)
"""Widths of latent attention that kernels of GPUs have: Kimi-K2's."""
LLAMA4_FOR_ENGINES = dict(**FOR_ENGINES, attention_chunk_size=128, floor_scale=64)
"""Chunks of vLLM's block size on CPUs."""

_SHARED = dict(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=512,
    bos_token_id=1,
    eos_token_id=2,
    pad_token_id=0,
)
_LLAMA3_ROPE = dict(
    rope_type="llama3",
    rope_theta=10000.0,
    factor=4.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
YARN_ROPE = dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=128)
"""Attention factor 0.1 ln 4 + 1 = 1.139."""


def _config(model_type, /, **settings):
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **{**_SHARED, **settings})


_llama = partial(_config, "llama")
# with the keys of Qwen2.5's windows, which are off
_qwen2 = partial(_config, "qwen2", use_sliding_window=False, sliding_window=8, max_window_layers=2)
_olmo2 = partial(_config, "olmo2")
# head_dim is 24, where hidden size / heads is 16, as in Mistral Nemo
_mistral = partial(_config, "mistral", head_dim=24, sliding_window=None)
_smollm3 = partial(_config, "smollm3")
_qwen3 = partial(_config, "qwen3", head_dim=24)
# two of four experts per token
_qwen3_moe = partial(
    _config, "qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, head_dim=24
)
llama4_text = partial(
    _config,
    "llama4_text",
    intermediate_size=64,
    intermediate_size_mlp=96,
    head_dim=16,
    num_local_experts=4,
    attention_chunk_size=16,
    floor_scale=8,
)
"""A Llama4TextConfig: layer 3 without RoPE; chunks and temperature intervals shorter than the sequences."""


def _llama4_multimodal(**settings):
    """A Llama4Config: the text model above with a tiny vision tower."""
    from transformers import Llama4Config

    vision = dict(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        vision_output_dim=64,
        image_size=28,
        patch_size=14,
        projector_input_dim=64,
        projector_output_dim=64,
    )
    text = llama4_text(interleave_moe_layer_step=2, **settings)
    tokens = dict(image_token_index=60, boi_token_index=61, eoi_token_index=62)
    return Llama4Config(text_config=text.to_dict(), vision_config=vision, **tokens)


# keys of 16 + 8, values of 12; two of eight experts, after a dense layer
_LATENT = dict(
    **dict(q_lora_rank=20, kv_lora_rank=28, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=12),
    **dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1),
    **dict(n_group=1, topk_group=1, first_k_dense_replace=1, routed_scaling_factor=2.5),
    **dict(num_nextn_predict_layers=0, num_key_value_heads=4),
)
_deepseek = partial(_config, "deepseek_v3", **_LATENT, topk_method="noaux_tc", scoring_func="sigmoid")
# with the rotary part of a head by MiniMax's two keys, and the keys that only engines read
_minimax = partial(
    _config,
    "minimax_m2",
    **dict(head_dim=24, rotary_dim=12, num_local_experts=8, num_experts_per_tok=2, intermediate_size=48),
    **dict(scoring_func="sigmoid", use_routing_bias=True),
)
_SPARSE = dict(
    **dict(n_routed_experts=8, num_experts_per_tok=2, moe_intermediate_size=48, n_shared_experts=1),
    **dict(first_k_dense_replace=1, routed_scaling_factor=2.5, norm_topk_prob=True, attention_bias=True),
)
"""Experts as DeepSeek-V3's, and biases in the attention."""
_ONE_HEAD = dict(num_key_value_heads=1, rope_parameters=YARN_ROPE)

_SCALES = dict(mscale=1.0, mscale_all_dim=0.5)
"""YaRN's two scales, which differ, so that cosine and sine have a factor as well as the softmax."""
KINDS = {
    "kimi": partial(_deepseek, n_routed_experts=12, num_experts_per_tok=4, rope_parameters=YARN_ROPE | _SCALES),
    "deepseek": partial(_deepseek, n_group=4, topk_group=2, num_experts_per_tok=4, rope_parameters=YARN_ROPE),
    "moonlight": partial(_deepseek, q_lora_rank=None, n_shared_experts=2),
    "llama": _llama,
    "llama_tied": partial(_llama, tie_word_embeddings=True, rope_parameters=_LLAMA3_ROPE),
    "llama_biased": partial(_llama, attention_bias=True, rope_parameters=YARN_ROPE),
    "mistral": _mistral,
    "olmo2": _olmo2,
    "olmo2_tied": partial(_olmo2, tie_word_embeddings=True, num_key_value_heads=4),
    "qwen2": _qwen2,
    "qwen2_tied": partial(_qwen2, tie_word_embeddings=True, rope_parameters=YARN_ROPE),
    "qwen3": _qwen3,
    "qwen3_tied": partial(_qwen3, tie_word_embeddings=True, **_ONE_HEAD),
    "qwen3_moe": partial(_qwen3_moe, norm_topk_prob=True, mlp_only_layers=[1]),
    "qwen3_moe_tied": partial(_qwen3_moe, norm_topk_prob=False, decoder_sparse_step=2, tie_word_embeddings=True),
    "smollm3": _smollm3,
    "seed_oss": partial(_config, "seed_oss", head_dim=24),
    "ernie4_5": partial(_config, "ernie4_5", head_dim=24),
    "exaone4": partial(_config, "exaone4", sliding_window=None, layer_types=["full_attention"] * 4, head_dim=24),
    "flash": partial(_config, "glm4_moe_lite", **_LATENT, rms_norm_eps=1e-6),
    "glm4_moe": partial(_config, "glm4_moe", **_SPARSE, head_dim=24, use_qk_norm=True),
    "minimax_m2": _minimax,
    "mixtral": partial(_config, "mixtral", num_local_experts=4, num_experts_per_tok=2, head_dim=24),
    "olmoe": partial(_config, "olmoe", num_experts=4, num_experts_per_tok=2, intermediate_size=48),
    "dots1": partial(_config, "dots1", **_SPARSE, sliding_window=None),
    "llama4": partial(llama4_text, moe_layers=[0, 2, 3]),
    "llama4_tied": partial(llama4_text, interleave_moe_layer_step=2, tie_word_embeddings=True),
    "llama4_multimodal": _llama4_multimodal,
}
"""Kind -> maker of its config. Covers all mixes of dense and MoE layers; one KV head in qwen3_tied."""
SMALL_WEIGHTS = ("llama_biased", "mistral", "qwen2", "qwen2_tied", "smollm3", "seed_oss", "ernie4_5", "mixtral")
"""Kinds with smaller weights in the layers; else the fp32 error of transformers itself is 1e-4: their queries and
keys have no norm."""
WITH_EXPERTS = (
    *("qwen3_moe", "llama4", "kimi", "deepseek", "moonlight"),
    *("flash", "glm4_moe", "minimax_m2", "mixtral", "olmoe", "dots1"),
)
"""Beginnings of the kinds with experts."""
FUSED = ("qwen3_moe_tied",)
"""Kinds that are saved in transformers' in-memory layout: a layer's experts in one tensor."""


def make(
    kind,
    path,
    *,
    dtype=torch.float32,
    std=0.3,
    init=None,
    **settings,
):
    """Create and save the policy `kind` of KINDS, its config changed by `settings`; returns transformers' model.

    `std` is the standard deviation of matrices; much larger widths require less. `init` initializes the parameters of
    the fp32 model instead. Rotary frequencies of the returned model are rounded to `dtype`, those of a model loaded
    from the folder are not.
    """
    return save(
        KINDS[kind](**settings),
        path,
        dtype=dtype,
        std=std,
        layers_std=std / 2 if kind in SMALL_WEIGHTS else std,
        init=init,
        original=kind not in FUSED,
    )


def save(
    config,
    path,
    *,
    dtype=torch.float32,
    std=0.3,
    layers_std=None,
    init=None,
    original=True,
):
    """`make` for a config of transformers. layers_std: in the layers, None: as outside. original: as published."""
    from transformers import AutoModelForCausalLM, Llama4ForConditionalGeneration
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.manual_seed(20251013)
    whole = config.model_type == "llama4"
    model = Llama4ForConditionalGeneration(config) if whole else AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        if init is None:
            _large_weights(model, std=std, layers_std=std if layers_std is None else layers_std)
        else:
            init(model)
    biases = {name: b.data for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")}
    model = model.to(dtype).eval()
    for name, bias in biases.items():  # published checkpoints have them in fp32
        model.get_buffer(name).data = bias
    model.save_pretrained(path, save_original_format=original)
    return model


def _large_weights(model, *, std, layers_std):
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):  # changes which experts are chosen
            buffer.normal_(0.0, 0.1)
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, layers_std if ".layers." in name else std)
        else:
            parameter.add_(torch.randn_like(parameter) * (0.3 if "bias" in name else 0.1))


def write_policy(path, *, seed=0):
    """A two-layer Llama with large random weights, so that its distributions are far from uniform."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(seed)
    small = dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, head_dim=8)
    config = KINDS["llama"](**small, max_position_embeddings=256, initializer_range=0.3, pad_token_id=None)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def rows(lengths=ROWS):
    """Packed rows of random tokens: the same tokens in sequence k of the concatenated list, however packed."""
    found, counter = [], 0
    for row in lengths:
        tokens, targets, weights = [], [], []
        for length in row:
            generator = torch.Generator().manual_seed(1000 + counter)
            ids = torch.randint(0, VOCAB, (length + 1,), generator=generator)
            weight = torch.rand(length, generator=generator) - 0.3
            weight[-1] = 0.0
            tokens, targets, weights = [*tokens, ids[:-1]], [*targets, ids[1:]], [*weights, weight]
            counter += 1
        cu_seqlens = torch.tensor([0, *row]).cumsum(0).int()
        found.append(
            dict(
                tokens=torch.cat(tokens)[None],
                position_ids=torch.cat([torch.arange(length) for length in row])[None],
                cu_seqlens=cu_seqlens,
                targets=torch.cat(targets),
                weights=torch.cat(weights),
            )
        )
    return found


def row_logits(model, row):
    """[N, vocab] logits of a Hugging Face model for a packed row, sequence by sequence."""
    starts = row["cu_seqlens"].tolist()
    return torch.cat([model(input_ids=row["tokens"][:, a:b]).logits[0] for a, b in pairwise(starts)])


def of_targets(logits, targets):
    """[N] log-probabilities (nats) of targets [N], from logits [N, vocab]."""
    return logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]


def completion_logprobs(model, sample):
    """[T] log-probabilities (nats) of a sample's completion under a Hugging Face model."""
    ids = torch.tensor([sample.prompt_token_ids + sample.rollout.token_ids])
    return of_targets(model(ids).logits[0, :-1].float(), ids[0, 1:])[len(sample.prompt_token_ids) - 1 :]
