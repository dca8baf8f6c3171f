"""Examples for the warm start: rows of a file as tokens, with the forced phrase excluded from the loss.

The forced phrase is searched in the text, and character offsets tell the phrase's tokens. A search for the phrase's
tokens would fail, because byte-pair vocabularies merge the first and last characters with neighboring characters. A
token with a part of the phrase and a neighboring character is excluded from the loss too, or else the policy would
learn to begin the phrase.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from megatron_scalerl.prompts.end_tokens import end_token_ids, text_config
from megatron_scalerl.prompts.layouts import values_of
from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.prompts.sources import Row, listing, read_json_lines, refuse_surrogates
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record
from megatron_scalerl.types import Rollout


@record
class Examples:
    """The training data of a warm start."""

    samples: tuple[tuple[tuple[int, ...], Rollout], ...]
    """[rows kept] tokens of the prompt, and the completion as a rollout whose loss mask excludes forced tokens."""
    too_long: tuple[str, ...]
    """Entries for skipped rows: file, line, tokens of the row and tokens allowed."""

    def lines(self) -> list[str]:
        """A report of the skipped rows, as lines of text; empty if no row was skipped."""
        if not self.too_long:
            return []
        head = f"sft: {len(self.samples)} examples, {len(self.too_long)} too long and skipped (sft.too_long):"
        return [head, *listing(self.too_long)]


def read_examples(recipe: Recipe, tokenizer: Any) -> Examples:
    """Read, render and encode the rows of `sft.path`.

    Raises ValueError, naming file and line, for a file that is missing or empty, a line that is not JSON, a row
    without `prompt` or `completion`, a completion that continues after an end of sequence (with sft.add_eos) or
    contains the forced phrase without the closing tag, and, unless sft.too_long is skip, a row that is too long.
    """
    rows = _rows(recipe.sft.path)
    prompts = PromptRenderer(tokenizer, recipe.prompts).token_ids([row.values["prompt"] for row in rows])
    completions = tokenizer([row.values["completion"] for row in rows], add_special_tokens=False)["input_ids"]
    forced = _ForcedPhrase(recipe, tokenizer)
    ends = end_token_ids(recipe.policy.path, tokenizer) if recipe.sft.add_eos else ()
    key, limit = _longest(recipe)
    samples = []
    too_long = []
    for row, prompt, ids in zip(rows, prompts, completions, strict=True):
        mask = forced.loss_mask(row, ids)
        token_ids, loss_mask = _with_end_token(row, tuple(ids), mask, ends)
        rollout = Rollout(
            token_ids=token_ids,
            rollout_logprobs=(0.0,) * len(token_ids),
            policy_versions=(0,) * len(token_ids),
            loss_mask=tuple(loss_mask),
            interrupted=not all(loss_mask),
            truncated=False,
            thinking_cut=0,
            seed=0,
        )
        length = len(prompt) + len(token_ids)
        if length <= limit:
            samples.append((prompt, rollout))
            continue
        too_long.append(f"{row.where}: {length} tokens are more than {limit} ({key})")
        if recipe.sft.too_long == "error":
            raise ValueError(too_long[-1])
    if not samples:
        raise ValueError(f"{recipe.sft.path}: all rows have more than {limit} tokens ({key})")
    return Examples(samples=tuple(samples), too_long=tuple(too_long))


class _ForcedPhrase:
    """Finds the tokens of the recipe's forced phrase and closing think tag in a completion."""

    def __init__(self, recipe: Recipe, tokenizer: Any):
        self._tokenizer = tokenizer
        phrase = recipe.interruption.phrase
        tag = recipe.prompts.think_end
        self._phrase = phrase.strip()
        self._tag = tag
        # the whitespace before the tag may differ in examples that this package did not write
        blanks = re.escape(phrase[: len(phrase) - len(phrase.lstrip())])
        self._pattern = re.compile(f"(?:{blanks})?{re.escape(self._phrase)}\\s*{re.escape(tag)}")
        self._encoder: Tokenizer | None = None

    def loss_mask(self, row: Row, ids: Sequence[int]) -> list[bool]:
        """Return [T] booleans, False for every token with a character of phrase or tag. Raises ValueError, naming the
        line, for a phrase without tag."""
        completion = row.values["completion"]
        if not self._phrase or self._phrase not in completion:
            return [True] * len(ids)
        spans = [match.span() for match in self._pattern.finditer(completion)]
        if len(spans) != completion.count(self._phrase):
            raise ValueError(f"{row.where}: {self._tag!r} has to follow the forced phrase {self._phrase!r}")
        offsets = self._offsets(row, ids)
        mask = [not any(start < b and end > a for a, b in spans) for start, end in offsets]
        for a, b in spans:
            if not any(start < b and end > a for start, end in offsets):
                raise ValueError(
                    f"{row.where}: the forced phrase cannot be masked, since no token covers characters {a}-{b}"
                )
        return mask

    def _offsets(self, row: Row, ids: Sequence[int]) -> list[tuple[int, int]]:
        """Return [T] (first character, last character + 1) of the completion's tokens, whitespace included."""
        if not getattr(self._tokenizer, "is_fast", False):
            raise ValueError(
                f"{row.where}: {type(self._tokenizer).__name__} gives no character offsets, which are needed to "
                "mask the forced phrase; take a fast tokenizer (tokenizer.json)"
            )
        if self._encoder is None:
            # the post-processor of byte-level vocabularies would leave whitespace out of the offsets
            self._encoder = Tokenizer.from_str(self._tokenizer.backend_tokenizer.to_str())
            self._encoder.post_processor = None
            self._encoder.no_padding()
            self._encoder.no_truncation()
        encoded = self._encoder.encode(row.values["completion"], add_special_tokens=False)
        if encoded.ids != list(ids):
            raise ValueError(f"{row.where}: the tokenizer and its tokenizer.json encode the completion differently")
        return encoded.offsets


def _with_end_token(
    row: Row, ids: tuple[int, ...], mask: list[bool], ends: tuple[int, ...]
) -> tuple[tuple[int, ...], list[bool]]:
    """Return (tokens, loss mask) of a completion, with the first of the end tokens `ends` appended unless the
    completion ends with a token of `ends`, or `ends` is empty."""
    if not ends:
        return ids, mask
    at = next((i for i, token in enumerate(ids) if token in ends), len(ids))
    if at < len(ids) - 1:
        raise ValueError(
            f"{row.where}: token {at + 1} of {len(ids)} ends the sequence; with sft.add_eos only the last may do so"
        )
    if at < len(ids):
        return ids, mask
    return (*ids, ends[0]), [*mask, True]


def _longest(recipe: Recipe) -> tuple[str, int]:
    """Return (setting that limits the length of a row, largest number of tokens of prompt and completion
    together)."""
    limits = [("trainer.micro_batch_tokens", recipe.micro_batch_tokens)]
    context = text_config(recipe.policy.path).get("max_position_embeddings")
    if isinstance(context, int):
        limits.append(("max_position_embeddings of the policy", context))
    return min(limits, key=lambda limit: limit[1])


def _rows(path: str | None) -> list[Row]:
    """The rows of a .jsonl file. Raises ValueError if a prompt or a completion is not a text."""
    if path is None:
        raise ValueError("sft.path is missing; name a .jsonl file with the columns prompt and completion")
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"{file}: there is no such file of warm-start examples")
    rows = []
    for row in map(Row.readable, read_json_lines(file)):
        _check_texts(row)
        rows.append(row)
    if not rows:
        raise ValueError(f"{file}: the file has no warm-start examples")
    return rows


def _check_texts(row: Row) -> None:
    columns = ("prompt", "completion")
    values = values_of(row, columns)
    for column, text in zip(columns, values):
        if not isinstance(text, str) or not text:
            raise ValueError(f"{row.where}: {column!r} is {text!r}; it has to be a text")
        refuse_surrogates(row.where, column, text)
