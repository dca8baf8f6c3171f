"""Writes the page of a run as one file, with the completions of some groups, and the list of runs as one file."""

import logging
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec

from megatron_scalerl.checkpoints.atomic_io import write_durably
from megatron_scalerl.page.completions import Reader
from megatron_scalerl.page.find_runs import find_runs
from megatron_scalerl.page.groups import GroupIndex
from megatron_scalerl.page.render import page, runs_page
from megatron_scalerl.page.report import gain
from megatron_scalerl.page.run_data import RunData

logger = logging.getLogger(__name__)
MOST_BYTES = 25_000_000
"""Most bytes of the written file."""
GROUPS = 24
"""Number of groups in the file, unless the caller of `write_page` names more."""


def write_page(run_dir: Path, path: Path, *, group_ids: Iterable[int] = ()) -> tuple[int, int]:
    """Write the page of a run to `path`, for its owner only; returns (groups in the page, groups left out).

    A group is left out if the file has no room, or if a chosen group cannot be read: retention may have deleted the
    group. group_ids: groups that come first; `GroupIndex.chosen` adds groups up to `GROUPS`. Damage of the records is
    logged and named in the page. Raises ValueError for a folder that is no run and for a group of `group_ids` that
    cannot be read, OSError if `path` cannot be written.
    """
    run = _read(run_dir)
    index = GroupIndex(run_dir)
    index.update()
    data = run.payload() | {"live": False}
    data["header"]["damage"] += index.damage
    for line in data["header"]["damage"]:
        logger.warning("%s", line)
    reader = Reader(run_dir, run.recipe, index)
    named_ids = list(dict.fromkeys(group_ids))
    candidate_ids = list(dict.fromkeys([*named_ids, *(index.chosen(GROUPS - len(named_ids)))]))
    # times 2, because the length of the page is in characters, and a character may take several bytes
    room = MOST_BYTES - len(page(data, title="", live=False)) * 2
    groups = []
    for group_id in candidate_ids:
        try:
            group = _whole_group(reader, group_id)
        except ValueError:
            if group_id in named_ids:  # named by the user: an error
                raise
            continue
        size = _size(group)
        if size <= room:
            room -= size
            groups.append(group)
    left_out = len(candidate_ids) - len(groups)
    data |= {"groups": groups, "missing_groups": left_out}
    text = page(data, title=f"{data['header']['name']}: run", live=False)
    _write(path, text)
    return len(groups), left_out


def numbers(run_dir: Path) -> dict[str, Any]:
    """The data of the page, as JSON values, with the gain and the recipe's section cost. Raises ValueError, OSError
    for an invalid or unreadable file."""
    run = _read(run_dir)
    return run.payload() | {"gain": asdict(gain(run_dir)), "cost": run.recipe["cost"]}


def _read(run_dir: Path) -> RunData:
    run = RunData(run_dir)
    run.update()
    run.forecasts.make_all(run.validations, run.recipe)
    return run


def write_runs_page(folder: Path, path: Path) -> int:
    """Write the list of the runs below `folder` to `path`, for its owner only; returns the number of runs."""
    search = find_runs(folder)
    _write(path, runs_page(folder, search, {}))
    return len(search.runs)


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_durably(path, text.encode(), private=True)


def _whole_group(reader: Reader, group_id: int) -> dict[str, Any]:
    group = reader.group(group_id, texts=False)
    for facts in group["completions"]:
        facts["content"] = reader.completion(group_id, facts["index"])
    return group


def _size(group: dict[str, Any]) -> int:
    """An upper limit of the group's bytes in the page, where an escaped character takes six bytes."""
    encoded = msgspec.json.encode(group)
    return len(encoded) + 5 * sum(encoded.count(c) for c in (b"<", b">", b"&", b"\xe2\x80\xa8", b"\xe2\x80\xa9"))
