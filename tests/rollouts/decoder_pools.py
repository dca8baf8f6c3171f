"""Pools of decoder processes."""

from recipe_files import small_recipe
from worker_pools import count_restarts

from megatron_scalerl.rollouts.decoder_pool import DecoderPool
from megatron_scalerl.rollouts.plans import Plans
from megatron_scalerl.tiny.tokenizer import build_tokenizer

TOKENIZER = build_tokenizer()


def pool_of(folder, *, workers=1, **settings):
    interruption = {"thinking_tokens": [44, 52], "answer_tokens": 4}
    recipe = small_recipe(rollouts={"decoders": workers}, interruption=interruption)
    return count_restarts(DecoderPool(recipe, TOKENIZER, Plans(recipe, TOKENIZER), logs=folder, **settings))
