"""Random policies that talk in turns: they think until they are interrupted, and answer with digits."""

import json

import tiny_policies
import torch
from chat_templates import QWEN3_TURNS
from transformers import AutoModelForCausalLM
from turn_policies import ids_of, turns_tokenizer

ANSWER = tuple("0123456789")
"""What may follow `</think>` and each other; the end of the turn may, too."""


def make(folder, seed):
    """A dense policy with Qwen3's template, saved as a Hugging Face folder.

    The first dimension of its residual stream says whether the last token belongs to an answer: the layers write
    nothing into it.
    """
    tokenizer = turns_tokenizer(QWEN3_TURNS)
    [end, close, *digits] = [ids_of(tokenizer, text)[0] for text in ("<|im_end|>", "</think>", *ANSWER)]
    config = tiny_policies.config("dense")
    config.vocab_size = len(tokenizer)
    config.bos_token_id = config.pad_token_id = None
    config.eos_token_id = end
    model = tiny_policies.randomized(AutoModelForCausalLM.from_config(config).float(), seed)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight[0] = 0
            layer.mlp.down_proj.weight[0] = 0
        model.model.embed_tokens.weight[:, 0] = -5
        model.model.embed_tokens.weight[[close, *digits], 0] = 25
        model.lm_head.weight[:, 0] = 0
        model.lm_head.weight[[end, *digits], 0] = 10
        model.lm_head.weight[close, 0] = 3
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
    tokenizer.save_pretrained(folder)
    return folder
