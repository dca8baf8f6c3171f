"""Lists the finished groups in RUN/rollouts for people who look at a run; reads a group's tokens only on demand."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from functools import partial
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from megatron_scalerl.batching.rollout_bytes import joined_parts, rollout_of
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.rollouts.store import positions_of, read_arrays, read_header, segment_path, segments
from megatron_scalerl.types import BlockRef


@record
class ListedGroup:
    """A finished group of a run, without tokens; `read` also reads the tokens."""

    group_id: int
    interrupted: bool
    """True if the thinking of at least one completion was interrupted."""
    unconfirmed: bool
    """True if at least one completion is correct for the verifier and not for the second judge."""
    read: Callable[[], dict[str, Any]]
    """Reads the group as a dict: group_id, epoch, prompt, scores, rollouts (token ids, versions, loss mask and more).

    A rollout has the parts of an episode one after another. Raises ValueError for a damaged file.
    """


def listed_groups(run_dir: str | Path) -> Iterator[ListedGroup]:
    """The finished groups of a run whose segments are not deleted. Raises ValueError, naming the file, for damage."""
    folder = Path(run_dir) / "rollouts"
    if not folder.is_dir():
        raise ValueError(f"{run_dir}: there is no folder rollouts inside; name the folder of a run")
    stored_segments = segments(folder)
    for event in read_history(Path(run_dir)).finished.values():
        if event.segment not in stored_segments:
            # The segment was deleted, as the setting checkpoint.rollouts allows.
            continue
        path = segment_path(folder, event.segment)
        group_id, header = read_header(path, event.stored)
        yield ListedGroup(
            group_id=group_id,
            interrupted=any(completion.interrupted for completion in header.completions),
            unconfirmed=any(score.confirmed is False for score in header.scores),
            read=partial(stored_group, path, event.stored),
        )


def stored_group(path: Path, stored: BlockRef) -> dict[str, Any]:
    """The group at the place `stored` in the segment `path`, as `ListedGroup.read` returns a group.

    Raises as `store.read_block`.
    """
    group, samples = read_arrays(path, stored)
    header = group.header
    rollouts = []
    for position, completion in zip(positions_of(header.completions), header.completions):
        parts = samples[position : position + len(completion.samples)]
        starts = accumulate((len(part.token_ids) for part in parts[:-1]), initial=0)
        facts = {
            "turns": completion.turns,
            "environment_tokens": completion.environment_tokens,
            # position of each part in the block -> index of the part's first token
            "parts": dict(enumerate(starts, position)),
        }
        rollouts.append(asdict(rollout_of(joined_parts(parts))) | facts)
    return {
        "group_id": group.group_id,
        "epoch": header.epoch,
        "prompt": asdict(header.prompt),
        "rollouts": rollouts,
        "scores": [asdict(score) for score in header.scores],
    }


def spans(rollout: Mapping[str, Any]) -> Iterator[tuple[int, int, int, int, str]]:
    """(start, end, part, policy version, origin) for consecutive tokens of equal part, policy version and origin.

    rollout: from `stored_group`. Parts are numbered from 1. The origin is "forced", "environment", or empty for
    sampled tokens.
    """
    origins = ["" if sampled else "forced" for sampled in rollout["loss_mask"]]
    for start, end in rollout["environment"]:
        origins[start:end] = ["environment"] * (end - start)
    parts = accumulate(int(token in rollout["parts"].values()) for token in range(len(origins)))
    labels = list(zip(parts, rollout["policy_versions"], origins))
    for label, tokens in groupby(range(len(labels)), key=labels.__getitem__):
        numbers = list(tokens)
        yield numbers[0], numbers[-1] + 1, *label
