"""Decides whether a policy's prompts are rendered with the chat template, and which tags enclose thinking.

`chat_of` decides for a tokenizer and a kind of rows (text or messages), `chat_of_recipe` for a recipe. `Chat.settled`
puts the decision in place of every `auto` in the recipe, before prompts are rendered.
"""

from collections.abc import Collection, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import TemplateError

from megatron_scalerl.prompts.end_tokens import end_token_ids
from megatron_scalerl.prompts.layouts import SAMPLE, read_layout
from megatron_scalerl.prompts.sources import read_json_lines
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.recipe import check_tags
from megatron_scalerl.recipe.sections import AUTO, PromptsSection
from megatron_scalerl.recipe.tasks import Task, tasks_of
from megatron_scalerl.record import record

Messages = Sequence[Mapping[str, Any]]

THINK_TAGS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
    ("<|channel>thought\n", "<channel|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
)
"""Tags that open and close thinking in the chat templates of reasoning models."""
NO_TAGS = ("", "")
QUESTION = {"role": "user", "content": "1+1"}
ANSWER = {"role": "assistant", "content": "two"}
"""A sample question and a sample answer, from which a template's behavior is found out."""


@record
class Chat:
    """Whether prompts use the chat template, and the tags around thinking. Produced by `chat_of`."""

    chat_template: bool
    """Whether prompts are rendered with the tokenizer's chat template."""
    think_start: str
    """Tag that opens thinking; empty: no tag."""
    think_end: str
    """Tag that closes thinking; empty: the whole completion is the answer."""
    why: str
    """The decision in one sentence, for the user."""
    doubts: Mapping[str, Any]
    """Setting whose automatic choice may be wrong -> the alternative value that was not chosen."""

    def settled(self, recipe: Recipe) -> Recipe:
        """A copy of the recipe with the decision in place of every `auto`. Raises ValueError as `check_tags`."""
        tags = {"think_start": self.think_start, "think_end": self.think_end}
        recipe = recipe.with_settings(prompts={"chat_template": self.chat_template, **tags})
        if recipe.interruption.enabled == AUTO:
            recipe = recipe.with_settings(interruption={"enabled": bool(self.think_end.strip())})
        # pydantic's model_copy runs no validators, so the tags are checked here
        for task in recipe.by_task:
            check_tags(task)
        return recipe


def chat_of_recipe(recipe: Recipe, tokenizer: Any, *, messages: bool | None = None) -> Chat:
    """Apply `chat_of` to a recipe. The tasks of a mixture share one decision.

    messages: whether rows hold messages; None: looked up in the first rows of the prompt files that exist. Raises
    ValueError as `chat_of`, `read_layout` and `check_think_tags`.
    """
    if messages is None:
        messages = any(map(_has_messages, tasks_of(recipe)))
    end_ids: Sequence[int] = ()
    if tokenizer.chat_template:
        end_ids = end_token_ids(recipe.policy.path, tokenizer)
    warm_start = _warm_start(recipe)
    chat = chat_of(tokenizer, recipe.prompts, messages=messages, end_ids=end_ids, warm_start=warm_start)
    check_think_tags(tokenizer, chat.think_start, chat.think_end)
    return chat


def _has_messages(task: Task) -> bool:
    path = task.prompts.path
    if path is None or not Path(path).exists():
        return False
    layout, rows = read_layout(path, task.prompts, task.rewards.verifier)
    return any(layout.has_messages(row) for row in islice(rows, SAMPLE))


def _warm_start(recipe: Recipe) -> str:
    """The first completions of the warm start, as one text.

    If the file of sft.path is missing: prompts.think_end or, if that setting is auto, `</think>`.
    """
    path = recipe.sft.path
    end = recipe.prompts.think_end
    if path is None:
        return ""
    if not Path(path).is_file():
        return THINK_TAGS[0][1] if end == AUTO else end
    return "\n".join(str(row.values.get("completion")) for row in islice(read_json_lines(Path(path)), SAMPLE))


def chat_of(
    tokenizer: Any,
    prompts: PromptsSection,
    *,
    messages: bool,
    end_ids: Collection[int] = (),
    warm_start: str = "",
) -> Chat:
    """Decide the form of a policy's prompts; settings of `prompts` that are not auto do not change.

    tokenizer: Hugging Face's. messages: whether the rows have lists of messages. end_ids: tokens that end the
    policy's completions. warm_start: completions of the warm start's examples, as one text. Rows of messages use a
    template if the tokenizer has one. Rows of text use the template if the policy was tuned with the template: then
    the template ends an answer with a token of `end_ids`, unlike a template that a base policy only inherited. The
    tags are the template's, unless only inherited, else the warm start's, else none. If the template closes thinking
    in the prompt, there are no tags. Raises ValueError for a template that fails and, if prompts use the template,
    for a think_end that neither template, warm start, vocabulary nor prompt has.
    """
    template = tokenizer.get_chat_template() if tokenizer.chat_template else ""
    turn_end = _end_of_turn(tokenizer, prompts) if template else ""
    chat_tuned = any(token in end_ids for token in tokenizer(turn_end, add_special_tokens=False)["input_ids"])
    uses_template = bool(template) and (messages or chat_tuned)
    if isinstance(prompts.chat_template, bool):
        uses_template = prompts.chat_template
    sample_prompt = ""
    if uses_template and template:
        sample_prompt = apply_template(tokenizer, prompts, [QUESTION])
    texts = {
        "chat template": template + sample_prompt,
        "warm start": warm_start,
        # a line for each token, so that the end of one token and the start of the next never make a tag
        "vocabulary": "\n".join(tokenizer.get_vocab()),
        "prompt": prompts.prompt_template + (prompts.system or ""),
    }
    tag_sources = ["chat template", "warm start"]
    if not (uses_template or chat_tuned):
        tag_sources = ["warm start"]
    tags = next(filter(None, (tags_in(texts[source]) for source in tag_sources)), NO_TAGS)
    if any(sample_prompt.rstrip().endswith(end) for _, end in THINK_TAGS):
        tags = NO_TAGS
    doubts: dict[str, Any] = {}
    if prompts.chat_template == AUTO and template and not uses_template:
        doubts["prompts.chat_template"] = True
    vocabulary_tags = tags_in(texts["vocabulary"] + template)
    if prompts.think_end == AUTO and tags == NO_TAGS and vocabulary_tags and not uses_template:
        doubts |= zip(("prompts.think_start", "prompts.think_end", "interruption.enabled"), (*vocabulary_tags, True))
    start = prompts.think_start
    end = prompts.think_end
    if start == AUTO:
        start = tags[0] if end in (AUTO, tags[1]) else ""
    if end == AUTO:
        end = tags[1]
    rows = f"rows of {'messages' if messages else 'text'} "
    rows += _treatment(template, turn_end, uses_template=uses_template, chat_tuned=chat_tuned)
    decision = f"{rows}; {_thinking(texts, end, known_tag=end == tags[1], uses_template=uses_template)}"
    return Chat(chat_template=uses_template, think_start=start, think_end=end, why=decision, doubts=doubts)


def _end_of_turn(tokenizer: Any, prompts: PromptsSection) -> str:
    """The text with which the template ends a sample answer, line breaks replaced with spaces."""
    text = apply_template(tokenizer, prompts, [QUESTION, ANSWER], generation=False)
    return " ".join(text.rpartition(ANSWER["content"])[2].split())


def _treatment(template: str, turn_end: str, *, uses_template: bool, chat_tuned: bool) -> str:
    """A phrase for the user that says whether rows use the template, and why."""
    if not template:
        return "are sent as plain text, since the tokenizer has no chat template"
    words = "take the tokenizer's chat template"
    if not uses_template:
        words = "do not take the tokenizer's chat template; prompts.chat_template=true applies the template"
    if not chat_tuned:
        words += f" (the template ends answers with {turn_end or 'nothing'}, which is no end token of this policy)"
    return words


def _thinking(texts: Mapping[str, str], end: str, *, known_tag: bool, uses_template: bool) -> str:
    """A phrase for the user with the tag that closes thinking, and the source of the tag.

    texts: name of a source -> text. known_tag: whether `chat_of` took the tag from template or warm start. Raises
    ValueError for a tag that is in none of the texts, if prompts use the template.
    """
    if not end.strip():
        return "the policy has no tags around thinking, so the whole completion is the answer"
    source = next((source for source, text in texts.items() if end.strip() in text), "")
    if source or known_tag:
        return f"thinking is closed by {end!r}, as the {source or 'chat template'} has it"
    problem = f"prompts.think_end is {end!r}, which is missing in {', '.join(texts)}"
    if uses_template:
        raise ValueError(f"{problem}; set think_start and think_end to '', or name the warm start (sft.path)")
    return problem


def tags_in(text: str) -> tuple[str, str] | None:
    """The first pair of THINK_TAGS with a tag in the text, such as a template's source; None without such a pair."""
    return next((pair for pair in THINK_TAGS if any(tag.strip() in text for tag in pair)), None)


def check_turn(tokenizer: Any, prompts: PromptsSection) -> None:
    """Raises ValueError for a template whose prompt does not open the assistant's turn.

    A prompt opens the turn if add_generation_prompt adds text. Without added text, the prompt still opens the turn if
    an answer directly follows the question (Mistral), or if a second question does not start with the prompt's text.
    """

    def render(*messages: Mapping[str, str], generation: bool = False) -> str:
        try:
            return apply_template(tokenizer, prompts, messages, generation=generation)
        except ValueError:  # the template refuses two user messages in a row, so no longer text exists
            return prompt

    prompt = apply_template(tokenizer, prompts, [QUESTION]).rstrip()
    ignores = render(QUESTION).rstrip() == prompt
    answer_text = render(QUESTION, ANSWER).removeprefix(prompt).lstrip()
    opens = answer_text.startswith(ANSWER["content"]) or not render(QUESTION, QUESTION).startswith(prompt)
    if ignores and not opens:
        raise ValueError(
            "prompts.chat_template: the tokenizer's template ignores add_generation_prompt: the prompt ends with "
            f"{prompt[-20:]!r} and does not open the assistant's turn; correct the template, or set "
            "prompts.chat_template false"
        )


def apply_template(
    tokenizer: Any,
    prompts: PromptsSection,
    messages: Messages,
    *,
    tools: Sequence[Mapping[str, Any]] = (),
    generation: bool = True,
) -> str:
    """Render messages with the tokenizer's template.

    tools: JSON schemas of functions. generation: whether the text opens the assistant's turn. Raises ValueError for a
    template that fails.
    """
    try:
        text: str = tokenizer.apply_chat_template(
            messages,
            tools=list(tools) or None,
            tokenize=False,
            add_generation_prompt=generation,
            strftime_now=prompts.template_date.strftime,
            **prompts.template_arguments,
        )
    except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"prompts.chat_template: the tokenizer's template fails: {error}") from None
    return text


def check_think_tags(tokenizer: Any, start: str, end: str) -> None:
    """Check that the tokens of each think tag, one or several, decode to the same text.

    Whitespace around a tag may differ, since tokenizers move whitespace. `engine.interruption.plan_ids` checks the
    forced phrase, whose whitespace may not differ. Raises ValueError for a tag that decodes to another text.
    """
    for key, text in (("prompts.think_start", start), ("prompts.think_end", end)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if decoded.strip() != text.strip():
            raise ValueError(
                f"{key}: {text!r} becomes {decoded!r} when the tokenizer encodes and decodes it; choose another text"
            )
