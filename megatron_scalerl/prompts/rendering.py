"""Renders a problem as the tokens that an engine gets, and checks the tokenizer."""

import re
from collections.abc import Sequence
from typing import Any

from megatron_scalerl.prompts.chat import QUESTION, Messages, apply_template, check_turn, tags_in
from megatron_scalerl.prompts.layouts import Question
from megatron_scalerl.recipe.sections import PromptsSection

CHUNK = 1024
"""Number of problems that are tokenized in one call."""


class PromptRenderer:
    """Renders problems by the recipe: prompt_template, chat template, think prefill, beginning-of-sequence token.

    tokenizer: Hugging Face's. prompts: without `auto` (`Chat.settled`). Raises ValueError for a template without
    `{prompt}`, for settings of a chat template if prompts use none, and for a chat template whose think tags are not
    the recipe's.
    """

    def __init__(self, tokenizer: Any, prompts: PromptsSection):
        if "{prompt}" not in prompts.prompt_template:
            raise ValueError(
                f"prompts.prompt_template: {prompts.prompt_template!r} has no {{prompt}}, where the problem goes"
            )
        self._tokenizer = tokenizer
        self._prompts = prompts
        added_tokens = getattr(tokenizer, "added_tokens_decoder", {}).values()
        self.special = {*tokenizer.all_special_tokens, *(token.content for token in added_tokens if token.special)}
        if prompts.chat_template:
            self._check_chat()
        elif prompts.system is not None or prompts.template_arguments:
            key = "template_arguments" if prompts.system is None else "system"
            raise ValueError(f"prompts.{key} has no effect without prompts.chat_template true")

    def check(self, question: Question, place: str, column: str) -> None:
        """Raises ValueError for a question of several messages if prompts use no chat template, and for a text that
        contains a special token. place, column: where the question is from, for the error message."""
        if token := next((token for token in self.special if token in question.text), ""):
            # the tokenizer would encode the text as the special token
            raise ValueError(f"{place}: {column!r} contains the special token {token}")
        if len(question.messages) > 1 and not self._prompts.chat_template:
            raise ValueError(
                f"{place}: the row has several messages, which need prompts.chat_template true, and a tokenizer that "
                "has a template"
            )

    def text(self, question: Question | str) -> str:
        """The rendered prompt, which ends with the think prefill."""
        return self.prefilled(self._text(question))

    def prefilled(self, text: str) -> str:
        """Append the think prefill to a prompt that does not end with the prefill yet."""
        # Some chat templates add the opening tag, with or without a line break after the tag.
        if text.rstrip().endswith(self._prompts.think_start.rstrip()):
            return text
        return text + self._prompts.think_start

    def _text(self, question: Question | str) -> str:
        """The rendered prompt without the think prefill."""
        row_question = question if isinstance(question, Question) else Question(text=question)
        *earlier_messages, last = row_question.messages or ({"role": "user", "content": row_question.text},)
        # Not str.format: templates for mathematics contain braces, as in \boxed{}.
        content = self._prompts.prompt_template.replace("{prompt}", last["content"])
        if not self._prompts.chat_template:
            return content
        messages = [*earlier_messages, {**last, "content": content}]
        return apply_template(self._tokenizer, self._prompts, self.with_system(messages))

    def with_system(self, messages: Messages) -> Messages:
        """The messages with the recipe's system message, if any, in place of the row's."""
        if self._prompts.system is None:
            return messages
        other_messages = [message for message in messages if message["role"] != "system"]
        return [{"role": "system", "content": self._prompts.system}, *other_messages]

    def _check_chat(self) -> None:
        if not self._tokenizer.chat_template:
            raise ValueError("prompts.chat_template is true, but the tokenizer has no chat template")
        check_turn(self._tokenizer, self._prompts)
        source = self._tokenizer.get_chat_template()
        if unread := self._prompts.template_arguments.keys() - re.findall(r"\w+", source):
            raise ValueError(f"prompts.template_arguments: {min(unread)} is not in the chat template")
        system = self._prompts.system
        start = self._prompts.think_start.strip()
        end = self._prompts.think_end.strip()
        sample_prompt = self._text(QUESTION["content"])
        if system and system.strip() not in sample_prompt:
            raise ValueError("prompts.system is set, but the chat template leaves the system message out")
        tags = tags_in(source + sample_prompt)
        if tags and not end and sample_prompt.rstrip().endswith(tags[1]):
            # the prompt closes thinking, so the policy answers without thinking, and needs no tags in the recipe
            return
        if tags and (end != tags[1] or start not in ("", tags[0].strip())):
            raise ValueError(
                f"prompts.think_start, prompts.think_end: the chat template thinks in {tags[0]!r} and "
                f"{tags[1]!r}, not in {start!r} and {end!r}"
            )
        if end and sample_prompt.rstrip().endswith(end):
            raise ValueError(
                f"prompts.template_arguments: the prompt ends with {end}, so the policy could not think; set the "
                "argument with which the chat template leaves thinking open, such as enable_thinking (or train "
                "without thinking: prompts.think_start and think_end empty, and interruption.enabled false)"
            )

    def token_ids(self, problems: Sequence[Question | str]) -> list[tuple[int, ...]]:
        """Tokens of the rendered prompt for each problem, [problems][P]."""
        rendered: list[tuple[int, ...]] = []
        for start in range(0, len(problems), CHUNK):
            texts = [self.text(problem) for problem in problems[start : start + CHUNK]]
            # No special tokens are added, since some tokenizers would append an end-of-sequence token.
            encoded = self._tokenizer(texts, add_special_tokens=False)["input_ids"]
            rendered.extend(self.with_bos(ids) for ids in encoded)
        return rendered

    def with_bos(self, ids: Sequence[int]) -> tuple[int, ...]:
        """The tokens of a prompt, with the beginning-of-sequence token first if prompts.add_bos is set."""
        bos = self._tokenizer.bos_token_id
        if not self._prompts.add_bos or bos is None or ids[:1] == [bos]:
            return tuple(ids)
        return (bos, *ids)


def check_vocabulary(tokenizer: Any, model_vocabulary: int) -> None:
    """Raise ValueError unless the model has a row for every token of the tokenizer; the model may have more rows, as
    padding."""
    needed_rows = 1 + max(tokenizer.get_vocab().values())
    if model_vocabulary < needed_rows:
        raise ValueError(
            f"policy: the model has a vocabulary of {model_vocabulary} tokens, fewer than the {needed_rows} of the "
            "tokenizer; take the tokenizer of this model"
        )
