"""Chat settings: the system's message, arguments of the template, and the tags that a template thinks in."""

import re

import pytest
from chat_templates import GPT_OSS, LLAMA3, MAGISTRAL, QWEN3, R1_DISTILL, TURNS
from recipe_files import SETTLED
from refusals import refused

from megatron_scalerl.prompts.layouts import Question
from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.tiny.tokenizer import build_tokenizer

GPT_OSS_END = "<|end|><|start|>assistant<|channel|>final<|message|>"


def renderer(template, **settings):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    return PromptRenderer(tokenizer, PromptsSection(**SETTLED | {"chat_template": True} | settings))


ACCEPTED = {
    # template, settings -> the rendered prompt
    "Qwen3": (QWEN3, {}, "<|im_start|>user\n1+1<|im_end|>\n<|im_start|>assistant\n<think>"),
    "Qwen3 thinks": (
        QWEN3,
        {"template_arguments": {"enable_thinking": True}},
        "1+1<|im_end|>\n<|im_start|>assistant\n<think>",
    ),
    "a system": (
        QWEN3,
        {"system": "Be brief."},
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1<|im_end|>",
    ),
    "R1 distill": (R1_DISTILL, {}, "<bos><User>1+1<Assistant><think>\n"),
    "Llama 3": (
        LLAMA3,
        {"template_arguments": {"date_string": "1 Jan 2030"}},
        "Today 1 Jan 2030\n<|start_header_id|>user<|end_header_id|>\n\n1+1",
    ),
    "gpt-oss": (
        GPT_OSS,
        {
            "think_start": "<|channel|>analysis<|message|>",
            "think_end": GPT_OSS_END,
            "template_arguments": {"reasoning_effort": "high"},
        },
        "Reasoning: high<|start|>user<|message|>1+1<|end|><|start|>assistant<|channel|>analysis<|message|>",
    ),
    "Magistral": (
        MAGISTRAL.replace("{% generation %}", "").replace("{% endgeneration %}", ""),
        {"think_start": "[THINK]", "think_end": "[/THINK]"},
        "<|im_start|>assistant\n[THINK]",
    ),
}


@pytest.mark.parametrize("case", ACCEPTED)
def test_a_template_is_rendered_with_the_settings(case):
    template, settings, shown = ACCEPTED[case]
    assert shown in renderer(template, **settings).text("1+1")


def test_turns_are_kept_the_last_one_is_rendered_and_the_systems_is_replaced():
    messages = (
        {"role": "system", "content": "Old."},
        {"role": "user", "content": "1+1"},
        {"role": "assistant", "content": "2"},
    )
    question = Question(text="", messages=(*messages, {"role": "user", "content": "2+2"}))
    assert [re.sub(r"<\|im_(start|end)\|>\n?", "|", renderer(QWEN3, **s).text(question)) for s in (
        {"prompt_template": "{prompt}=?"}, {"system": "New."}
    )] == [
        "|system\nOld.||user\n1+1||assistant\n2||user\n2+2=?||assistant\n<think>",
        "|system\nNew.||user\n1+1||assistant\n2||user\n2+2||assistant\n<think>",
    ]  # fmt: skip


REFUSED = {
    "argument": (
        QWEN3,
        {"template_arguments": {"thinks": 1}},
        r"prompts\.template_arguments: thinks is not in the chat template",
    ),
    "no thinking": (
        QWEN3,
        {"template_arguments": {"enable_thinking": False}},
        r"ends with </think>, so the policy could not think; .* such as enable_thinking "
        r"\(or train without thinking: prompts\.think_start and think_end empty, and interruption\.enabled false",
    ),
    "thinks on demand": (
        TURNS + "{% if not enable_thinking %}<|channel>thought\n<channel|>{% endif %}",
        {"think_start": "<|channel>thought\n", "think_end": "<channel|>"},
        r"ends with <channel\|>, so the policy could not think",
    ),
    "no system": (
        R1_DISTILL,
        {"system": "Be brief."},
        r"prompts\.system is set, but the chat template leaves the system message out",
    ),
    "other tags": (MAGISTRAL, {}, r"prompts\.think_end: .*thinks in '\[THINK\]' and '\[/THINK\]', not in '<think>'"),
    "channels": (GPT_OSS, {}, re.escape(GPT_OSS_END)),
    "other closing": (R1_DISTILL, {"think_end": "</thought>"}, "thinks in '<think>' and '</think>'"),
    "no chat": (
        QWEN3,
        {"chat_template": False, "system": "x"},
        r"prompts\.system has no effect without prompts\.chat_template true",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_setting_that_has_no_effect_or_loses_the_answer_is_refused(case):
    template, settings, message = REFUSED[case]
    with refused(message):
        renderer(template, **settings)


@pytest.mark.parametrize(
    "source",
    [
        "{% include 'x' %}",
        "{{ 1 / 0 }}",
        "{{ 1 + 'a' }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{{ raise_exception('the first message must be of the system') }}",
    ],
)
def test_a_template_that_fails_is_one_line(source):
    with refused(r"^prompts\.chat_template: the tokenizer's template fails: "):
        renderer(source)
