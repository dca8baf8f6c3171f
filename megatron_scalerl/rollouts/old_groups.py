"""Groups in the folders of earlier versions: RUN/rollouts/groups-NNNNN.jsonl, one JSON line per group.

A file is scanned once for the places of its lines; a group is then read by its own bytes. Of two lines of a group the
later counts. A last line that a crash cut off is no group.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from megatron_scalerl.types import RolloutGroup

_GROUP_ID = re.compile(rb'\{"group_id":(\d+),')
"""The beginning of a line as `JsonlWriter` wrote it."""


class _Head(msgspec.Struct):
    group_id: int


class OldGroups:
    """The groups in the files of RUN/rollouts."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, dict[int, tuple[int, int, int]]] = {}

    def read(self, name: str, group_id: int) -> RolloutGroup | None:
        """A group of this file; None if the file does not have it. Raises ValueError naming file and line."""
        if name not in self._places:
            self._places[name] = _lines(self._folder / name)
        place = self._places[name].get(group_id)
        if place is None:
            return None
        number, offset, size = place
        with (self._folder / name).open("rb") as file:
            file.seek(offset)
            line = file.read(size)
        try:
            group = msgspec.json.decode(line, type=RolloutGroup)
        except (msgspec.DecodeError, RecursionError) as error:
            raise ValueError(f"{self._folder / name} line {number}: expected a group, found {error}") from None
        return group


def _lines(path: Path) -> dict[int, tuple[int, int, int]]:
    """Group id -> (number, offset, bytes) of its last complete line. Raises ValueError naming file and line."""
    found: dict[int, tuple[int, int, int]] = {}
    if not path.exists():
        return found
    offset = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            match = _GROUP_ID.match(line)
            if match and line.endswith(b"\n"):
                found[int(match[1])] = (number, offset, len(line))
            elif (group_id := _decoded_id(line, f"{path} line {number}")) is not None:
                found[group_id] = (number, offset, len(line))
            offset += len(line)
    return found


def _decoded_id(line: bytes, where: str) -> int | None:
    try:
        return msgspec.json.decode(line, type=_Head).group_id
    except (msgspec.DecodeError, RecursionError) as error:
        if not line.endswith(b"\n"):
            return None
        raise ValueError(f"{where}: expected a group, found {error}") from None
