"""Lists the finished groups in RUN/rollouts for people; a group is read when it is asked for."""

from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megatron_scalerl.batching.rollout_bytes import rollout_of
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.store import read_arrays, scan, segment_path, segments, stored_header
from megatron_scalerl.types import BlockRef


@record
class ListedGroup:
    """A finished group of a run, as far as its block's head shows it."""

    group_id: int
    interrupted: bool
    """True if the thinking of one of its completions was interrupted."""
    read: Callable[[], dict[str, Any]]
    """The group as `types.RolloutGroup` has it: group_id, epoch, prompt, scores, and rollouts with token ids,
    versions and loss mask. Raises ValueError for a damaged file."""


def listed_groups(run_dir: str | Path) -> Iterator[ListedGroup]:
    """Every stored group; of several with one id the last counts. Raises ValueError, naming the file, for damage."""
    folder = Path(run_dir) / "rollouts"
    if not folder.is_dir():
        raise ValueError(f"{run_dir}: there is no folder rollouts in it; name the folder of a run")
    numbers = segments(folder)
    for number in numbers:
        path = segment_path(folder, number)
        try:
            for stored, head in scan(path):
                yield ListedGroup(
                    group_id=head.group_id,
                    interrupted=any(c.interrupted for c in stored_header(head).completions),
                    read=partial(stored_group, path, stored),
                )
        except ValueError:
            if number != numbers[-1]:  # a block may be being written at the end of the newest file
                raise


def stored_group(path: Path, stored: BlockRef) -> dict[str, Any]:
    """The group at this place of a segment, as `ListedGroup.read` gives it. Raises as `store.read_block`."""
    group, completions = read_arrays(path, stored)
    header = group.header
    rollouts = map(rollout_of, completions)
    return {
        "group_id": group.group_id,
        "epoch": header.epoch,
        "prompt": asdict(header.prompt),
        "rollouts": [asdict(rollout) for rollout in rollouts],
        "scores": [asdict(score) for score in header.scores],
    }
