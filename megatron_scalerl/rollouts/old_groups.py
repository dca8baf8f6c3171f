"""Groups in the folders of earlier versions: RUN/rollouts/groups-NNNNN.jsonl, one JSON line per group.

A file is scanned once for the places of its lines; a group is then read by its own bytes. Of two lines of a group the
later counts. A last line that a crash cut off is no group.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from megatron_scalerl.batching.rollout_bytes import arrays_of, facts_of, write
from megatron_scalerl.types import LineRef, Prompt, Rollout, RolloutGroup, Score

_GROUP_ID = re.compile(rb'\{"group_id":(\d+),')
"""The beginning of a line as `JsonlWriter` wrote it."""


class _Head(msgspec.Struct):
    group_id: int


class _Row(msgspec.Struct):
    group_id: int
    prompt: Prompt
    rollouts: tuple[Rollout, ...]
    scores: tuple[Score, ...]
    first_token_version: int
    epoch: int
    lost_completions: int = 0


class OldGroups:
    """The groups in the files of RUN/rollouts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, dict[int, LineRef]] = {}

    def read(self, name: str, group_id: int) -> RolloutGroup | None:
        """A group of this file; None if the file does not have it. Raises ValueError naming file and line."""
        if name not in self._places:
            self._places[name] = _lines(self._folder / name)
        place = self._places[name].get(group_id)
        if place is None:
            return None
        row = _read_row(self._folder, place)
        return RolloutGroup(
            group_id=row.group_id,
            prompt=row.prompt,
            completions=tuple(facts_of(arrays_of(rollout)) for rollout in row.rollouts),
            positions=tuple(range(len(row.rollouts))),
            scores=row.scores,
            first_token_version=row.first_token_version,
            epoch=row.epoch,
            lost_completions=row.lost_completions,
            stored=place,
        )


def read_line(folder: Path, place: LineRef) -> list[bytes]:
    """[G] completions of the group in this line of RUN/rollouts, as `rollout_bytes.write` writes them.

    Raises ValueError naming file and line, OSError.
    """
    return [write(rollout) for rollout in _read_row(folder, place).rollouts]


def _read_row(folder: Path, place: LineRef) -> _Row:
    path = folder / place.file
    with path.open("rb") as file:
        file.seek(place.offset)
        line = file.read(place.nbytes)
    try:
        return msgspec.json.decode(line, type=_Row)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"{path} line {place.number}: expected a group, found {error}") from None


def _lines(path: Path) -> dict[int, LineRef]:
    """Group id -> its last complete line. Raises ValueError naming file and line."""
    found: dict[int, LineRef] = {}
    if not path.exists():
        return found
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            match = _GROUP_ID.match(line)
            whole = match is not None and line.endswith(b"\n")
            group_id = int(match[1]) if match and whole else _decoded_id(line, f"{path} line {number}")
            if group_id is not None:
                found[group_id] = LineRef(file=path.name, number=number, offset=offset, nbytes=len(line))
            offset += len(line)
    return found


def _decoded_id(line: bytes, where: str) -> int | None:
    try:
        return msgspec.json.decode(line, type=_Head).group_id
    except (msgspec.DecodeError, RecursionError) as error:
        if not line.endswith(b"\n"):
            return None
        raise ValueError(f"{where}: expected a group, found {error}") from None
