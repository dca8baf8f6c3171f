"""Decoder processes render messages and read calls of tools, whatever happens to the processes."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from chat_templates import CHATML, QWEN3_TURNS
from decoder_pools import TOKENIZER
from fakes.server import answer
from recipe_files import SETTLED, small_recipe
from turn_policies import TOOL, ids_of, past, save_policy
from worker_pools import count_restarts

from megatron_scalerl.batching.rollout_bytes import read
from megatron_scalerl.prompts.turns import PastTurn
from megatron_scalerl.rollouts.decoder_pool import DecoderPool, turn_settings
from megatron_scalerl.rollouts.plans import Plans

USER = ({"role": "user", "content": "1+1"},)


def pool_of(folder, template=QWEN3_TURNS, *, chat=True):
    """(the tokenizer, a pool for a policy with this template, its turns)."""
    tokenizer = save_policy(folder, template)
    recipe = small_recipe(
        policy={"path": str(folder)},
        prompts={"path": "q", **SETTLED, "chat_template": chat},
        rollouts={"decoders": 1},
        interruption={"enabled": False},
        environment={"name": "games:Game", "thinking": "strip"},
    )
    pool = DecoderPool(recipe, tokenizer, Plans(recipe, tokenizer), logs=folder)
    return tokenizer, count_restarts(pool), turn_settings(recipe, tokenizer, [TOOL])


async def decoded(pool, tokenizer, talk, text, **fields):
    ids = ids_of(tokenizer, text)
    body = json.dumps(answer(token_ids=ids, logprobs=(-0.5,) * len(ids), **fields)).encode()
    async with pool.slot():
        return (await pool.decode(body, plan=None, seed=0, where="engine-0", talk=talk))[0]


CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.slow
async def test_a_text_that_does_not_count_has_no_calls(tmp_path):
    tokenizer, pool, talk = pool_of(tmp_path)
    async with pool:
        cut = await decoded(pool, tokenizer, talk, f"\nadd</think>{CALL}", finish_reason="length")
        assert (cut.text, cut.tool_calls, cut.answer_start) == (None, (), 5)
        thinking = await decoded(pool, tokenizer, talk, f"{CALL}<|im_end|>")
        assert (thinking.text, thinking.tool_calls, thinking.answer_start) == (None, (), 0)


@pytest.mark.slow
async def test_messages_that_the_template_refuses_are_an_error_and_the_process_goes_on(tmp_path):
    source = QWEN3_TURNS.replace("<tool_response>\\n'", "<tool_response>\\n' + (m.name | default('', true))")
    refusing = source.replace(
        "{% else %}<|im_start|>", "{% elif m.content == 'no' %}{{ raise_exception('no') }}{% else %}<|im_start|>"
    )
    tokenizer, pool, talk = pool_of(tmp_path, refusing)
    turn = past(tokenizer, "2<|im_end|>")
    async with pool:
        with pytest.raises(ValueError, match=r"^prompts\.chat_template: the tokenizer's template fails: no$"):
            await pool.render([USER, ({"role": "user", "content": "no"},)], [turn], talk)
        assert len((await pool.render([USER, USER], [turn], talk))[0]) and not pool.restarts


@pytest.mark.slow
async def test_what_is_nested_too_deeply_is_an_error_and_the_process_goes_on(tmp_path):
    """Arguments that the policy wrote, in an answer of an agent, and tools."""
    tokenizer, pool, talk = pool_of(tmp_path)
    turn = past(tokenizer, "2<|im_end|>")
    errors = 0
    async with pool:
        for depth in (480, 940, 1100, 1300, 1480, 1490, 1500):
            nested = '{"a":' * depth + "1" + "}" * depth
            arguments = {}
            for _ in range(depth):
                arguments = {"a": arguments}
            function = {"name": "add", "arguments": arguments}
            message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
            for ask in (
                pool.render([USER, (message, *USER)], [turn], talk),
                pool.render([USER], [], replace(talk, tools=f"[{nested}]")),
            ):
                try:
                    await ask
                except (ValueError, RecursionError):
                    errors += 1
            text = f'<tool_call>{{"name": "add", "arguments": {nested}}}</tool_call>'
            await decoded(pool, tokenizer, talk, f"</think>{text}<|im_end|>")
        assert len(await pool.render([USER], [], talk)) == 2 and errors and not pool.restarts


@pytest.mark.slow
async def test_ids_that_the_tokenizer_does_not_have_are_decoded_and_rendered(tmp_path):
    """An engine samples any row of the embedding, which is padded in many policies."""
    tokenizer, pool, talk = pool_of(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 5000}}))
    recipe = small_recipe(policy={"path": str(tmp_path)}, interruption={"enabled": False})
    assert Plans(recipe, tokenizer).vocabulary == 5000 > len(tokenizer)
    (tmp_path / "config.json").write_text("{}")
    assert Plans(recipe, tokenizer).vocabulary == len(tokenizer)
    ids = [*ids_of(tokenizer, "add</think>"), 4999, *ids_of(tokenizer, "2"), tokenizer.eos_token_id]
    body = json.dumps(answer(token_ids=ids, logprobs=(-0.5,) * len(ids))).encode()
    async with pool:
        async with pool.slot():
            said, _ = await pool.decode(body, plan=None, seed=0, where="engine-0", talk=talk)
        assert said.text == "2" and read(said.data).token_ids.tolist() == ids
        turn = PastTurn(token_ids=tuple(ids), answer_start=said.answer_start)
        assert len((await pool.render([USER, USER], [turn], talk))[0])
        assert not pool.restarts


def test_a_policy_that_cannot_have_the_tools_is_refused_before_a_process_starts(tmp_path):
    with pytest.raises(ValueError, match="format of tool calls is not supported"):
        pool_of(tmp_path, CHATML)
    with pytest.raises(ValueError, match=r"tools need prompts\.chat_template true"):
        pool_of(tmp_path, chat=False)


def test_without_an_environment_a_process_imports_no_transformers(tmp_path):
    program = (
        "import sys\n"
        "from megatron_scalerl.rollouts.decoder import Decoding\n"
        "Decoding(sys.stdin.buffer.read())\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    recipe = small_recipe()
    pool = DecoderPool(recipe, TOKENIZER, Plans(recipe, TOKENIZER), logs=tmp_path)
    subprocess.run([sys.executable, "-c", program], input=pool._workers._program.setup, check=True)
