"""Renders a problem as the tokens that are sent to the engine, and checks that the tokenizer supports it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from megatron_scalerl.recipe.sections import PromptsSection

CHUNK = 1024
"""Problems that are tokenized in one call."""


class PromptRenderer:
    """Renders problems as the recipe says: template, chat template, think prefill, first token.

    `tokenizer` is a Hugging Face tokenizer. Raises ValueError for a template without `{prompt}` and for
    `prompts.chat_template` with a tokenizer that has none.
    """

    def __init__(self, tokenizer: Any, prompts: PromptsSection) -> None:
        if "{prompt}" not in prompts.prompt_template:
            raise ValueError(
                f"prompts.prompt_template: expected a text with {{prompt}}, found {prompts.prompt_template!r}"
            )
        if prompts.chat_template and not tokenizer.chat_template:
            raise ValueError("prompts.chat_template: expected a tokenizer with a chat template, found none")
        self._tokenizer = tokenizer
        self._prompts = prompts
        added = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self._special = {*tokenizer.all_special_tokens, *(token.content for token in added if token.special)}

    def text(self, problem: str) -> str:
        """The rendered prompt, which ends with the think prefill."""
        # Not str.format: templates for mathematics contain braces, as in \boxed{}.
        text = self._prompts.prompt_template.replace("{prompt}", problem)
        if self._prompts.chat_template:
            message = {"role": "user", "content": text}
            day = self._prompts.template_date
            try:
                text = self._tokenizer.apply_chat_template(
                    [message], tokenize=False, add_generation_prompt=True, strftime_now=day.strftime
                )
            except TemplateError as error:
                raise ValueError(f"prompts.chat_template: the tokenizer's template fails: {error}") from None
        # Some chat templates add the opening tag themselves, with or without a line break after it.
        if text.rstrip().endswith(self._prompts.think_start.rstrip()):
            return text
        return text + self._prompts.think_start

    def special_token_in(self, problem: str) -> str:
        """A special token that the text of a problem spells out, or nothing: the policy would read it as one."""
        return next((token for token in self._special if token in problem), "")

    def token_ids(self, problems: Sequence[str]) -> list[tuple[int, ...]]:
        """[problems][P] tokens of the rendered prompts."""
        rendered: list[tuple[int, ...]] = []
        for start in range(0, len(problems), CHUNK):
            texts = [self.text(problem) for problem in problems[start : start + CHUNK]]
            # No special tokens: some tokenizers would append an end-of-sequence token.
            encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            rendered.extend(self._with_bos(ids) for ids in encoded)
        return rendered

    def _with_bos(self, ids: Sequence[int]) -> tuple[int, ...]:
        bos = self._tokenizer.bos_token_id
        if not self._prompts.add_bos or bos is None or ids[:1] == [bos]:
            return tuple(ids)
        return (bos, *ids)


def check_think_tags(tokenizer: Any, start: str, end: str) -> None:
    """Check that each think tag decodes to itself; it may be several tokens.

    Whitespace around a tag may differ, since tokenizers move it. The forced phrase, whose whitespace may not differ,
    is checked by `engine.interruption.plan_ids`. Raises ValueError for an empty closing tag and for a text that does
    not decode to itself.
    """
    if not end.strip():
        raise ValueError("prompts.think_end: expected a tag that closes thinking, found an empty one")
    for key, text in (("prompts.think_start", start), ("prompts.think_end", end)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        decoded = tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if decoded.strip() != text.strip():
            raise ValueError(f"{key}: expected a text that survives encode and decode, found {text!r} -> {decoded!r}")


def check_vocabulary(tokenizer: Any, model_vocabulary: int) -> None:
    """Raise ValueError unless the model has a row for every token of the tokenizer; padded rows are fine."""
    needed = 1 + max(tokenizer.get_vocab().values())
    if model_vocabulary < needed:
        raise ValueError(
            f"policy: expected a vocabulary of at least {needed}, the tokenizer's, found {model_vocabulary} in "
            "the model"
        )
