"""Tiny untrained policies as Hugging Face folders: a Llama and a Llama-4-style mixture of experts."""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from megatron_scalerl.tiny.tokenizer import BOS_ID, EOS_ID, MODEL_VOCABULARY, PAD_ID, save_tokenizer

INIT_STD = 0.02
"""Standard deviation of initial weights; divided by sqrt(2 x layers) in matrices that write to the residual
stream."""
CONTEXT = 512
"""Positions (tokens); the longest prompt and completion of the task are about 85 tokens."""
COMMON: dict[str, Any] = {
    "vocab_size": MODEL_VOCABULARY,
    "num_hidden_layers": 3,
    "head_dim": 32,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": BOS_ID,
    "eos_token_id": EOS_ID,
    "pad_token_id": PAD_ID,
}


def make_llama(path: str | Path, seed: int) -> None:
    """Write a dense Llama policy (fp32, 1,205,568 parameters) with tokenizer into folder `path`."""
    config = LlamaConfig(
        **COMMON, hidden_size=192, intermediate_size=512, num_attention_heads=6, num_key_value_heads=2
    )
    _save(LlamaForCausalLM(config), path, seed)


def make_llama4(path: str | Path, seed: int) -> None:
    """Write a Llama-4-style text policy (fp32) with tokenizer into folder `path`.

    Every layer routes each token to one of 4 experts by a sigmoid router, in addition to a shared expert; queries and
    keys are normalized. All three layers have RoPE, since Llama 4 omits RoPE in every fourth layer only; attention
    chunks are longer than the context and attention temperature is off.
    """
    config = Llama4TextConfig(
        **COMMON,
        hidden_size=128,
        intermediate_size=256,
        intermediate_size_mlp=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=1,
        use_qk_norm=True,
        attention_chunk_size=8192,
        attn_temperature_tuning=False,
        router_aux_loss_coef=0.0,
    )
    _save(Llama4ForCausalLM(config), path, seed)


def _save(model: PreTrainedModel, path: str | Path, seed: int) -> None:
    model = model.float()
    _initialize(model, seed)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS_ID, eos_token_id=EOS_ID, pad_token_id=PAD_ID, do_sample=True, temperature=1.0
    )
    disable_progress_bar()
    model.save_pretrained(path)
    save_tokenizer(path)


@torch.no_grad()
def _initialize(model: PreTrainedModel, seed: int) -> None:
    """Draw every weight matrix from a normal distribution, with one generator and in the order of the parameters'
    names. Weights of norms are 1."""
    generator = torch.Generator().manual_seed(seed)
    residual_std = INIT_STD / math.sqrt(2 * model.config.num_hidden_layers)
    # Sorted by name, so that a version of transformers with another order of modules draws the same numbers.
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            parameter.fill_(1.0)
            continue
        std = INIT_STD
        if "o_proj" in name or "down_proj" in name:
            std = residual_std
        parameter.normal_(0.0, std, generator=generator)
