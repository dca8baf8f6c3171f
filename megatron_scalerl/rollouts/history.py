"""Reads the journal of a run: events, and the groups and batches that the events refer to.

A restart, step by step: `read_history` decodes the events into compact records, with references to blocks of groups;
`check_groups` checks that the store has every group that the resume needs; `replay_draws` restores the curriculum;
`read_batch` reads the heads of blocks for each batch that the resume trains again, and `read_groups` for the finished
groups that are in no batch.
"""

from collections.abc import Container, Iterable
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from megatron_scalerl.prompts.curriculum import Curriculum
from megatron_scalerl.recipe.file import RecipeError
from megatron_scalerl.record import record
from megatron_scalerl.rollouts.store import positions_of, read_header, segment_path
from megatron_scalerl.types import BlockRef, RolloutGroup

Count = Annotated[int, Meta(ge=0)]


class Admit(msgspec.Struct, frozen=True, kw_only=True, gc=False, tag_field="event", tag="admit"):
    """Event of the journal: a prompt was drawn for a new group."""

    group_id: Count
    prompt_id: str
    epoch: int


class Finish(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    gc=False,
    tag_field="event",
    tag="finish",
    omit_defaults=True,
    rename={"nbytes": "bytes"},
):
    """Event of the journal: a group is finished, and the group's block is on the disk."""

    group_id: Count
    prompt_id: str
    pass_rate: float
    first_token_version: int
    segment: Count
    offset: Count
    nbytes: Count

    @property
    def stored(self) -> BlockRef:
        """The place of the group's block in the rollout store."""
        return BlockRef(segment=self.segment, offset=self.offset, nbytes=self.nbytes)


class BatchRecord(msgspec.Struct, frozen=True, kw_only=True, tag_field="event", tag="batch"):
    """Event of the journal: a batch of these groups is about to be trained on."""

    batch: Count
    """Number of the batch, from 0, over all attempts of the run; also counts batches that made no step."""
    step: Count
    """The optimizer step for which the batch was composed, from 1."""
    policy_version: int
    """Version of the policy at the start of the step."""
    group_ids: tuple[int, ...]


@record
class History:
    """The events in the journal of earlier attempts of a run. Produced by `read_history`."""

    events: tuple[Admit | Finish, ...]
    """Every draw and every finished group, in order."""
    batches: tuple[BatchRecord, ...]
    finished: dict[int, Finish]
    """Group id -> last finish event of the group, which may have finished again after a restart."""

    @property
    def admitted(self) -> int:
        """Number of groups for which a prompt was drawn."""
        return sum(isinstance(event, Admit) for event in self.events)

    @property
    def last_step(self) -> int:
        """The last optimizer step for which a batch was composed; 0 before the first batch."""
        return max((record.step for record in self.batches), default=0)

    @property
    def last_segment(self) -> int:
        """Number of the last segment of the store that the journal names; -1 if the journal names no segment."""
        return max((event.segment for event in self.finished.values()), default=-1)

    def unbatched(self) -> tuple[int, ...]:
        """Ids of the finished groups that are in no batch, in order of admission."""
        batched = {g for record in self.batches for g in record.group_ids}
        return tuple(sorted(g for g in self.finished if g not in batched))

    def to_reissue(self, ready: Container[int]) -> tuple[Admit, ...]:
        """The draws of groups that are neither in a batch nor in `ready`, in order of admission."""
        batched = {g for record in self.batches for g in record.group_ids}
        return tuple(
            e for e in self.events if isinstance(e, Admit) and e.group_id not in batched and e.group_id not in ready
        )


NO_HISTORY = History(events=(), batches=(), finished={})


def read_history(run_dir: Path) -> History:
    """Read RUN/journal.jsonl. Raises ValueError naming file and line for an invalid line."""
    path = run_dir / "journal.jsonl"
    events = []
    batches = []
    finished = {}
    for event in _events(path):
        if isinstance(event, BatchRecord):
            batches.append(event)
            continue
        events.append(event)
        if isinstance(event, Finish):
            finished[event.group_id] = event
    missing_groups = [(r.batch, g) for r in batches for g in r.group_ids if g not in finished]
    if missing_groups:
        batch, group = missing_groups[0]
        raise ValueError(f"{path}: batch {batch} has group {group}, and the journal lacks the group's finish event")
    return History(events=tuple(events), batches=tuple(batches), finished=finished)


def _events(path: Path) -> Iterable[Admit | Finish | BatchRecord]:
    if path.exists():
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                event = read_event(line, f"{path} line {number}")
                if event is None:
                    return
                yield event


def read_event(line: bytes, location: str) -> Admit | Finish | BatchRecord | None:
    """The event in a line of the journal; None for a last line that a crash cut off. Raises ValueError if invalid."""
    try:
        return EVENT_DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        if not line.endswith(b"\n"):
            # Only a last line, cut off by a crash, has no line end.
            return None
        raise ValueError(f"{location}: the line is no valid event of a journal: {error}") from None


EVENT_DECODER: msgspec.json.Decoder[Admit | Finish | BatchRecord] = msgspec.json.Decoder(Admit | Finish | BatchRecord)


def replay_draws(curriculum: Curriculum, history: History) -> None:
    """Bring a new curriculum to the state at the end of the journal, by replaying draws and pass rates.

    Raises RecipeError if a draw gives a prompt that is not the prompt in the journal.
    """
    for event in history.events:
        if isinstance(event, Admit):
            prompt, _ = curriculum.draw()
            if prompt.prompt_id != event.prompt_id:
                raise RecipeError(
                    f"journal.jsonl: group {event.group_id} had the prompt {event.prompt_id}, and would now have "
                    f"{prompt.prompt_id}; restore the prompts, held-out split and seed that the run began with"
                )
        elif isinstance(event, Finish):
            curriculum.observe(event.prompt_id, event.pass_rate)


def read_groups(run_dir: Path, history: History, group_ids: Iterable[int]) -> dict[int, RolloutGroup]:
    """Group id -> the finished group, without tokens: only headers of blocks are read.

    Raises ValueError, naming the segment's file and the block's first byte, for a missing or damaged group.
    """
    folder = run_dir / "rollouts"
    return {group_id: _read_group(folder, history.finished[group_id]) for group_id in group_ids}


def read_batch(run_dir: Path, history: History, record: BatchRecord) -> list[RolloutGroup]:
    """The groups of a batch, in the batch's order, without tokens. Raises ValueError for a missing group."""
    return list(read_groups(run_dir, history, record.group_ids).values())


def check_groups(run_dir: Path, history: History, batches: int) -> None:
    """Check that the store has every group that a resume needs; raises ValueError if a group is missing or damaged.

    batches: number of batches that the checkpoint of the resume includes.
    """
    needed_groups = [g for record in history.batches[batches:] for g in record.group_ids]
    read_groups(run_dir, history, [*needed_groups, *history.unbatched()])


def _read_group(folder: Path, event: Finish) -> RolloutGroup:
    stored = event.stored
    path = segment_path(folder, stored.segment)
    group_id, header = read_header(path, stored)
    if group_id != event.group_id:
        raise ValueError(
            f"{path}: byte {stored.offset}: the block has group {group_id}; the journal names group {event.group_id}"
        )
    return RolloutGroup(
        group_id=group_id,
        prompt=header.prompt,
        completions=header.completions,
        positions=positions_of(header.completions),
        scores=header.scores,
        first_token_version=header.first_token_version,
        epoch=header.epoch,
        lost_completions=header.lost_completions,
        lost_reasons=header.lost_reasons,
        stored=stored,
    )
