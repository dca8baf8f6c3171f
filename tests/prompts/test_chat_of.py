"""Chat template and think tags follow from tokenizer, rows and warm start; what nobody can answer is refused."""

import pytest
from byte_tokenizers import byte_tokenizer
from chat_templates import CHATML, GPT_OSS, IGNORING, LLAMA3, MAGISTRAL, MISTRAL, OPEN, QWEN3, R1_DISTILL, TURNS
from json_lines import write
from recipe_files import SETTLED, small_recipe
from refusals import refused

from megatron_scalerl.prompts.chat import chat_of, chat_of_recipe
from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.recipe.sections import PromptsSection

THINK = ("<think>", "</think>")
NONE = ("", "")


def tokenizer_with(template, tokens=(), end="<|im_end|>"):
    """Without tags in its vocabulary unless `tokens` has some. end: its end of sequence."""
    tokenizer = byte_tokenizer(template)
    tokenizer.add_tokens(list(tokens))
    tokenizer.add_special_tokens({"eos_token": end})
    return tokenizer


def case(
    template, tags=NONE, why="whole completion", *, tokens=(), messages=True, warm_start="", takes=True, **settings
):
    """What decides, and what is decided: whether prompts take the template, the tags, a part of the sentence."""
    return template, tokens, settings, messages, warm_start, takes, tags, why


GPT_OSS_TAGS = ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>")
SILENT = {"template_arguments": {"enable_thinking": False}}
DECIDED = {
    "Qwen2.5": case(CHATML, why="whole completion is the answer"),
    "Qwen2.5, text": case(CHATML, why="rows of text take the tokenizer's chat template;", messages=False),
    "Qwen2.5, warm start": case(CHATML, THINK, "as the warm start has it", warm_start="no\n2</think>3"),
    "a template is not its vocabulary": case(CHATML, tokens=THINK),
    "Qwen3": case(QWEN3, THINK, "as the chat template has it", tokens=THINK),
    "Qwen3, text": case(QWEN3, THINK, "rows of text take", tokens=THINK, messages=False),
    "Qwen3, flattened": case(QWEN3, THINK, "messages do not take", tokens=THINK, takes=False, chat_template=False),
    "Qwen3 does not think": case(QWEN3, tokens=THINK, **SILENT),
    "R1 distill": case(R1_DISTILL, THINK, "rows of text take", messages=False, chat_template=True),
    "Llama 3": case(LLAMA3),
    "Magistral": case(MAGISTRAL, ("[THINK]", "[/THINK]"), "'[/THINK]'"),
    "gpt-oss": case(GPT_OSS, GPT_OSS_TAGS, "chat template"),
    "base": case(None, why="the tokenizer has no chat template", takes=False),
    "base, warm start": case(
        None, THINK, "as the warm start has it", messages=False, warm_start="x</think>", takes=False
    ),
    "base, tokens": case(None, tokens=("[THINK]", "[/THINK]"), messages=False, takes=False),
    "the recipe's": case(QWEN3, think_start="", think_end=""),
    "the recipe's closing tag": case(
        None, ("", "</t>"), "is missing in chat", messages=False, takes=False, think_end="</t>"
    ),
    "the recipe's, as the prompt asks": case(
        CHATML, ("", "</think>"), "as the prompt has it", think_end="</think>", system="Think, then </think>"
    ),
    "the recipe's, taught elsewhere": case(
        None, ("<t>", "</t>"), "is missing in chat", messages=False, takes=False, think_start="<t>", think_end="</t>"
    ),
    "the recipe's opening tag": case(QWEN3, ("", "</think>"), "'</think>'", think_start=""),
}


@pytest.mark.parametrize("name", DECIDED)
def test_template_and_tags_follow_from_tokenizer_rows_and_warm_start(name):
    template, tokens, settings, messages, warm_start, takes, tags, why = DECIDED[name]
    tokenizer = tokenizer_with(template, tokens)
    ends = {tokenizer.eos_token_id}
    chat = chat_of(tokenizer, PromptsSection(**settings), messages=messages, end_ids=ends, warm_start=warm_start)
    assert (chat.chat_template, (chat.think_start, chat.think_end)) == (takes, tags)
    assert why in chat.why


TUNED = {
    # template -> a token that ends its turns
    "Qwen": (CHATML, "<|im_end|>"),
    "Llama 3": (LLAMA3, "<|eot_id|>"),
    "R1 distill": (R1_DISTILL, "<end>"),
    "Mistral": (MISTRAL, "</s>"),
}


@pytest.mark.parametrize("case", TUNED)
@pytest.mark.parametrize("inherited", [False, True])
def test_rows_of_text_take_the_template_whose_turns_end_as_the_policys_completions(case, inherited):
    template, end = TUNED[case]
    tokenizer = tokenizer_with(template, THINK, end="<|endoftext|>" if inherited else end)
    chat = chat_of(tokenizer, PromptsSection(), messages=False, end_ids=[tokenizer.eos_token_id])
    assert chat.chat_template is not inherited
    assert (f"the template ends answers with {end}, which is no end token" in chat.why) is inherited
    # an inherited template teaches its policy no tags either, and the user is asked
    thinks = THINK if case == "R1 distill" and not inherited else NONE
    assert (chat.think_start, chat.think_end) == thinks
    tags = {"prompts.think_start": "<think>", "prompts.think_end": "</think>", "interruption.enabled": True}
    assert chat.doubts == ({"prompts.chat_template": True} | tags if inherited else {})


def test_end_tokens_of_the_folder_tell_of_conversations_too(tmp_path):
    tokenizer = tokenizer_with(LLAMA3, ["<|eot_id|>"], end="<|end_of_text|>")
    rows = write(tmp_path / "rows.jsonl", [TEXT])
    for ends, takes in ((tokenizer.eos_token_id, False), (tokenizer.convert_tokens_to_ids("<|eot_id|>"), True)):
        write(tmp_path / "generation_config.json", [{"eos_token_id": ends}])
        recipe = small_recipe(policy={"path": str(tmp_path)}, prompts={"path": rows})
        assert chat_of_recipe(recipe, tokenizer).chat_template is takes


@pytest.mark.parametrize("settings", [{"think_end": "</think>"}, {"think_start": "<think>", "think_end": "</thnik>"}])
@pytest.mark.parametrize("warm_start", ["", "2</done>3"])
def test_a_closing_tag_that_nobody_writes_is_refused(settings, warm_start):
    prompts = PromptsSection(**settings)
    with refused(rf"^prompts\.think_end is '{prompts.think_end}', which is missing in"):
        chat_of(tokenizer_with(CHATML), prompts, messages=True, warm_start=warm_start)


ALTERNATING = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}"


@pytest.mark.parametrize(
    "template", [IGNORING, IGNORING + "\n", ALTERNATING + TURNS, OPEN.replace("add_generation_prompt", "gen") + TURNS]
)
def test_a_template_that_ignores_the_generation_prompt_is_refused(template):
    settings = SETTLED | {"chat_template": True, "think_start": "", "think_end": ""}
    with refused(r"ignores add_generation_prompt: the prompt ends with '.*<\|im_end\|>'"):
        PromptRenderer(tokenizer_with(template), PromptsSection(**settings))


TEXT = {"problem": "1+1", "answer": "2"}
MESSAGES = {"prompt": [{"role": "user", "content": "1+1"}], "answer": "2"}


@pytest.mark.parametrize("rows", [[TEXT], [MESSAGES], [{"other": 1}, MESSAGES], None])
def test_a_recipe_is_settled_by_its_rows_and_its_warm_start(tmp_path, rows):
    path = str(tmp_path / "gone.jsonl") if rows is None else write(tmp_path / "p.jsonl", rows)
    taught = write(tmp_path / "sft.jsonl", [{"prompt": "1+1", "completion": "one and one[/THINK]2"}])
    for sft, tags in ((taught, ("[THINK]", "[/THINK]")), ("gone.jsonl", THINK), (None, NONE)):
        recipe = small_recipe(prompts={"path": path}, sft={"path": sft})
        settled = chat_of_recipe(recipe, tokenizer_with(CHATML)).settled(recipe)
        assert settled.prompts.chat_template is True
        assert (settled.prompts.think_start, settled.prompts.think_end) == tags
        assert settled.interruption.enabled is (tags != NONE)


def test_all_tasks_of_a_mixture_are_rendered_alike(tmp_path):
    tasks = {name: {"path": write(tmp_path / f"{name}.jsonl", [row]), "weight": 1}
             for name, row in (("a", TEXT), ("b", MESSAGES))}  # fmt: skip
    recipe = small_recipe(prompts={"tasks": tasks})
    assert chat_of_recipe(recipe, tokenizer_with(QWEN3)).settled(recipe).prompts.chat_template is True


def test_an_interruption_of_thinking_that_no_tag_closes_is_refused():
    recipe = small_recipe(prompts={"path": "p"}, interruption={"enabled": True})
    with refused(r"prompts\.think_end is empty, but a tag has to close thinking"):
        chat_of_recipe(recipe, tokenizer_with(CHATML), messages=True).settled(recipe)
