"""Loads prompts: rows of a file become rendered `Prompt`s, some of them held out for validation.

The split depends on the texts alone, not on the order of the rows or on other columns. Skipped rows (duplicates,
prompts that are too long) are counted in a `PromptReport`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from megatron_scalerl.prompts.rendering import PromptRenderer
from megatron_scalerl.prompts.sources import Row, listing, read_rows, refuse_surrogates
from megatron_scalerl.recipe.sections import PromptsSection
from megatron_scalerl.types import Prompt


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptReport:
    """Counts of kept and skipped rows."""

    rows: int
    """Rows read; of both files if held-out prompts have their own."""
    training: int
    held_out: int
    duplicates: int
    """Rows whose text and answer equal those of an earlier row."""
    leaked: int
    """Training rows skipped because their text is in the file of held-out prompts."""
    too_long: tuple[str, ...]
    """One entry for each skipped prompt: file, line, tokens found and allowed."""

    def lines(self) -> list[str]:
        """The report as text, one line for each reason to skip rows."""
        lines = [f"prompts: {self.rows} rows, {self.training} to train on, {self.held_out} held out"]
        if self.duplicates:
            lines.append(f"prompts: {self.duplicates} duplicates skipped")
        if self.leaked:
            lines.append(f"prompts: {self.leaked} training rows skipped whose text is held out")
        if self.too_long:
            lines += [f"prompts: {len(self.too_long)} too long and skipped:", *listing(self.too_long)]
        return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptSet:
    """The prompts of a run."""

    training: tuple[Prompt, ...]
    """In the order of the file."""
    held_out: tuple[Prompt, ...]
    """In the order of their hashes, so that the first n do not depend on the order of the file."""
    report: PromptReport


def prompt_id(text: str, answer: str) -> str:
    """Stable id of a prompt: 16 hexadecimal digits of the SHA-256 of problem and reference answer."""
    return hashlib.sha256(json.dumps([text, answer]).encode()).hexdigest()[:16]


def load_prompts(tokenizer: Any, prompts: PromptsSection) -> PromptSet:
    """Read, render and split the prompts of the recipe's section.

    `tokenizer` is a Hugging Face tokenizer. Held out are the prompts of `held_out_path`, or else the `held_out`
    prompts of `path` whose texts have the smallest hashes; below 1, `held_out` is a share of all possible texts.
    Raises ValueError, in one line, for an invalid file or if no training prompt is left.
    """
    loader = _Loader(tokenizer, prompts)
    found = loader.load(prompts.path)
    leaked = 0
    if prompts.held_out_path is not None:
        held_out = loader.load(prompts.held_out_path)
        texts = {prompt.text for prompt in held_out}
        training = [prompt for prompt in found if prompt.text not in texts]
        leaked = len(found) - len(training)
    else:
        training, held_out = split_held_out(found, prompts.held_out)
    if not training:
        raise ValueError(
            f"prompts.held_out: expected fewer than the {len(found)} prompts of {prompts.path}, "
            f"found {len(held_out)} held out and none to train on"
        )
    report = PromptReport(
        rows=loader.rows,
        training=len(training),
        held_out=len(held_out),
        duplicates=loader.duplicates,
        leaked=leaked,
        too_long=tuple(loader.too_long),
    )
    in_order_of_hash = sorted(held_out, key=lambda prompt: (_text_hash(prompt.text), prompt.prompt_id))
    return PromptSet(training=tuple(training), held_out=tuple(in_order_of_hash), report=report)


def split_held_out(prompts: Sequence[Prompt], held_out: int | float) -> tuple[list[Prompt], list[Prompt]]:
    """(training, held out): the `held_out` texts with the smallest hashes; below 1, a share of the range of hashes.

    Prompts with the same text stay together. A share does not move existing prompts when prompts are added later.
    """
    if 0 < held_out < 1:
        chosen = {prompt.text for prompt in prompts if _text_hash(prompt.text) < held_out * 2**256}
    else:
        chosen = set(sorted({prompt.text for prompt in prompts}, key=_text_hash)[: int(held_out)])
    training = [prompt for prompt in prompts if prompt.text not in chosen]
    return training, [prompt for prompt in prompts if prompt.text in chosen]


def _text_hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest(), "big")


class _Loader:
    """Reads files into prompts and counts skipped rows."""

    def __init__(self, tokenizer: Any, prompts: PromptsSection) -> None:
        self._renderer = PromptRenderer(tokenizer, prompts)
        self._prompts = prompts
        self.rows = 0
        self.duplicates = 0
        self.too_long: list[str] = []

    def load(self, path: str) -> list[Prompt]:
        columns = (self._prompts.prompt_column, self._prompts.answer_column)
        unique: dict[str, tuple[Row, str, str]] = {}
        before = self.rows
        for row in read_rows(path, columns, self._prompts.split):
            self.rows += 1
            text, answer = (_as_text(row, column) for column in columns)
            if not text.strip():
                raise ValueError(f"{row.where}: expected a text in {columns[0]!r}, found an empty one")
            identity = prompt_id(text, answer)
            self.duplicates += identity in unique
            unique.setdefault(identity, (row, text, answer))
        if self.rows == before:
            raise ValueError(f"{path}: expected at least one prompt, found an empty file")
        kept = self._render(unique)
        if not kept:
            raise ValueError(
                f"{path}: expected a prompt of at most {self._prompts.max_prompt_tokens} tokens "
                f"(prompts.max_prompt_tokens), found all {len(unique)} longer"
            )
        return kept

    def _render(self, unique: dict[str, tuple[Row, str, str]]) -> list[Prompt]:
        limit = self._prompts.max_prompt_tokens
        columns = (self._prompts.prompt_column, self._prompts.answer_column)
        all_token_ids = self._renderer.token_ids([text for _, text, _ in unique.values()])
        kept = []
        for (identity, (row, text, answer)), token_ids in zip(unique.items(), all_token_ids):
            if len(token_ids) > limit:
                self.too_long.append(f"{row.where}: {len(token_ids)} tokens, at most {limit} allowed")
                continue
            extra = {name: value for name, value in row.values.items() if name not in columns}
            _check_extra(row, extra)
            kept.append(Prompt(prompt_id=identity, text=text, answer=answer, token_ids=token_ids, extra=extra))
        return kept


def _check_extra(row: Row, extra: Mapping[str, Any]) -> None:
    """Other columns go into the journal: a value that JSON cannot represent is refused before the run starts."""
    for name, value in extra.items():
        try:
            msgspec.json.encode({name: value})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ValueError(f"{row.where}: expected JSON data in {name!r}, found {error}") from None


def _as_text(row: Row, column: str) -> str:
    value = row.values[column]
    if not isinstance(value, (str, int, float)):
        found = "nothing" if value is None else f"a {type(value).__name__}"
        raise ValueError(f"{row.where}: expected a text or a number in {column!r}, found {found}")
    text = str(value)
    refuse_surrogates(row.where, column, text)
    return text
