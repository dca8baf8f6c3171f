"""Pools of decoder processes."""

from megatron_scalerl.recipe import Recipe
from megatron_scalerl.rollouts.decoder_pool import DecoderPool
from megatron_scalerl.rollouts.plans import Plans
from megatron_scalerl.tiny.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


def pool_of(folder, *, workers=1, **settings):
    recipe = Recipe(
        name="r",
        steps=1,
        policy={"path": "p"},
        prompts={"path": "q"},
        rollouts={"decoders": workers},
        interruption={"thinking_tokens": [44, 52], "answer_tokens": 4},
    )
    return DecoderPool(recipe, TOKENIZER, Plans(recipe, TOKENIZER), logs=folder, **settings)
