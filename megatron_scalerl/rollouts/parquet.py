"""Trained rollouts as Parquet, for people: RUN/rollouts/segment-NNNNN.parquet, one row per completion.

Read by DuckDB, pandas, polars, Hugging Face datasets. docs/runs.md describes the columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow
from pyarrow import parquet

from megatron_scalerl.batching.rollout_bytes import RolloutArrays
from megatron_scalerl.checkpoints.atomic_io import naming, sync
from megatron_scalerl.rollouts.history import BatchRecord
from megatron_scalerl.rollouts.store import StoredGroup, read_arrays
from megatron_scalerl.types import BlockRef

ROW_GROUP_TOKENS = 4 << 20
"""Completion tokens in one row group, about 64 MiB before compression."""
SCHEMA = pyarrow.schema(
    [
        ("group_id", pyarrow.int64()),
        ("index", pyarrow.int32()),
        ("batch", pyarrow.int64()),
        ("step", pyarrow.int64()),
        ("policy_version", pyarrow.int64()),
        ("epoch", pyarrow.int32()),
        ("prompt_id", pyarrow.string()),
        ("prompt", pyarrow.string()),
        ("answer", pyarrow.string()),
        ("prompt_token_ids", pyarrow.list_(pyarrow.int32())),
        ("reward", pyarrow.float64()),
        ("correct", pyarrow.bool_()),
        ("reason", pyarrow.string()),
        ("truncated", pyarrow.bool_()),
        ("interrupted", pyarrow.bool_()),
        ("tokens", pyarrow.int32()),
        ("sampled_tokens", pyarrow.int32()),
        ("first_version", pyarrow.int64()),
        ("last_version", pyarrow.int64()),
        ("thinking_cut", pyarrow.int32()),
        ("seed", pyarrow.int64()),
        # One value per token of the completion.
        ("token_ids", pyarrow.list_(pyarrow.int32())),
        ("logprobs", pyarrow.list_(pyarrow.float32())),
        ("versions", pyarrow.list_(pyarrow.int32())),
        ("loss_mask", pyarrow.list_(pyarrow.bool_())),
    ]
)
_SCORE = ("reward", "correct", "reason")
_ROLLOUT = ("token_ids", "loss_mask", "interrupted", "truncated", "thinking_cut", "seed")
"""Columns with the names of `types.Score` and `types.Rollout`."""


def write_parquet(path: Path, segment: Path, trained: Sequence[tuple[BlockRef, BatchRecord]]) -> None:
    """Write these groups of a segment, atomically; only the owner can read the file.

    Holds `ROW_GROUP_TOKENS` tokens at a time. Raises OSError naming the file, ValueError for a damaged block.
    """
    draft = path.with_name(f".{path.name}.draft")
    draft.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    try:
        with naming(path), os.fdopen(os.open(draft, flags, 0o600), "wb") as file:
            with parquet.ParquetWriter(file, SCHEMA, compression="zstd") as writer:
                for table in _tables(segment, trained):
                    writer.write_table(table)
            file.flush()
            os.fsync(file.fileno())
    except (OSError, ValueError):
        draft.unlink(missing_ok=True)
        raise
    draft.replace(path)
    sync(path.parent)


def _tables(segment: Path, trained: Iterable[tuple[BlockRef, BatchRecord]]) -> Iterator[pyarrow.Table]:
    rows: list[dict[str, Any]] = []
    tokens = 0
    for stored, record in trained:
        group, arrays = read_arrays(segment, stored)
        rows += _rows(group, arrays, record)
        tokens += sum(len(rollout.token_ids) for rollout in arrays)
        if tokens >= ROW_GROUP_TOKENS:
            yield pyarrow.Table.from_pylist(rows, schema=SCHEMA)
            rows = []
            tokens = 0
    if rows:
        yield pyarrow.Table.from_pylist(rows, schema=SCHEMA)


def _rows(group: StoredGroup, arrays: Sequence[RolloutArrays], record: BatchRecord) -> Iterator[dict[str, Any]]:
    header = group.header
    for index, (rollout, facts, score) in enumerate(zip(arrays, header.completions, header.scores)):
        yield {
            "group_id": group.group_id,
            "index": index,
            "epoch": header.epoch,
            "prompt_id": header.prompt.prompt_id,
            "prompt": header.prompt.text,
            "answer": header.prompt.answer,
            "prompt_token_ids": header.prompt.token_ids,
            "logprobs": rollout.rollout_logprobs,
            "versions": rollout.policy_versions,
            **_fields(record, "batch", "step", "policy_version"),
            **_fields(facts, "tokens", "sampled_tokens", "first_version", "last_version"),
            **_fields(score, *_SCORE),
            **_fields(rollout, *_ROLLOUT),
        }


def _fields(value: object, *names: str) -> dict[str, Any]:
    return {name: getattr(value, name) for name in names}


def list_groups(path: Path) -> list[tuple[int, int, bool]]:
    """(group id, step, whether thinking was interrupted in one of its completions) of every group, in order.

    Raises ValueError naming the file if it is not Parquet with these columns.
    """
    groups: dict[tuple[int, int], bool] = {}
    for row in _read(path, ["group_id", "step", "interrupted"], None):
        key = row["group_id"], row["step"]
        groups[key] = groups.get(key, False) or row["interrupted"]
    return [(*key, interrupted) for key, interrupted in groups.items()]


def read_group(path: Path, group_id: int) -> dict[str, Any]:
    """A group with the names of `types.RolloutGroup`, and `step`. Raises ValueError naming the file."""
    rows = sorted(_read(path, None, [("group_id", "=", group_id)]), key=lambda row: int(row["index"]))
    first = rows[0]
    return {
        **{name: first[name] for name in ("group_id", "step", "epoch")},
        "prompt": {
            "prompt_id": first["prompt_id"],
            "text": first["prompt"],
            "answer": first["answer"],
            "token_ids": first["prompt_token_ids"],
        },
        "scores": [{name: row[name] for name in _SCORE} for row in rows],
        "rollouts": [
            {name: row[name] for name in _ROLLOUT}
            | {"rollout_logprobs": row["logprobs"], "policy_versions": row["versions"]}
            for row in rows
        ],
    }


def _read(path: Path, columns: list[str] | None, filters: list[tuple[str, str, int]] | None) -> list[dict[str, Any]]:
    try:
        table = parquet.read_table(path, columns=columns or SCHEMA.names, filters=filters, partitioning=None)
        found: list[dict[str, Any]] = table.to_pylist()
    except (pyarrow.ArrowException, OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: expected rollouts as Parquet, found {str(error).splitlines()[0]}") from None
    return found
