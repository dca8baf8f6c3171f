"""Trained rollouts as Parquet, for people: RUN/rollouts/segment-NNNNN.parquet, one row per completion.

Read by DuckDB, pandas, polars, Hugging Face datasets. docs/runs.md describes the columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
from pyarrow import parquet

from megatron_scalerl.batching.rollout_bytes import RolloutArrays
from megatron_scalerl.checkpoints.atomic_io import naming, sync
from megatron_scalerl.rollouts.history import BatchRecord
from megatron_scalerl.rollouts.store import StoredGroup, read_arrays
from megatron_scalerl.types import BlockRef

ROW_GROUP_TOKENS = 4 << 20
"""Completion tokens in one row group, about 64 MiB before compression."""
_LISTS = {
    "token_ids": pyarrow.int32(),
    "logprobs": pyarrow.float32(),
    "versions": pyarrow.int32(),
    "loss_mask": pyarrow.bool_(),
}
"""Columns with one value per token of the completion."""
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
        *((name, pyarrow.list_(kind)) for name, kind in _LISTS.items()),
    ]
)


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
    arrays: list[RolloutArrays] = []
    tokens = 0
    for stored, record in trained:
        group, found = read_arrays(segment, stored)
        rows += _rows(group, found, record)
        arrays += found
        tokens += sum(len(a.token_ids) for a in found)
        if tokens >= ROW_GROUP_TOKENS:
            yield _table(rows, arrays)
            rows, arrays, tokens = [], [], 0
    if rows:
        yield _table(rows, arrays)


def _rows(group: StoredGroup, arrays: Sequence[RolloutArrays], record: BatchRecord) -> Iterator[dict[str, Any]]:
    """Every column but the lists over completion tokens."""
    header = group.header
    for index, (each, facts, score) in enumerate(zip(arrays, header.completions, header.scores)):
        yield {
            "group_id": group.group_id,
            "index": index,
            "batch": record.batch,
            "step": record.step,
            "policy_version": record.policy_version,
            "epoch": header.epoch,
            "prompt_id": header.prompt.prompt_id,
            "prompt": header.prompt.text,
            "answer": header.prompt.answer,
            "prompt_token_ids": header.prompt.token_ids,
            "reward": score.reward,
            "correct": score.correct,
            "reason": score.reason,
            "truncated": facts.truncated,
            "interrupted": facts.interrupted,
            "tokens": facts.tokens,
            "sampled_tokens": facts.sampled_tokens,
            "first_version": facts.first_version,
            "last_version": facts.last_version,
            "thinking_cut": each.thinking_cut,
            "seed": each.seed,
        }


def _table(rows: list[dict[str, Any]], arrays: Sequence[RolloutArrays]) -> pyarrow.Table:
    starts = np.cumsum([0, *(len(a.token_ids) for a in arrays)], dtype=np.int32)
    columns = {
        "token_ids": [a.token_ids for a in arrays],
        "logprobs": [a.rollout_logprobs for a in arrays],
        "versions": [a.policy_versions for a in arrays],
        "loss_mask": [a.loss_mask for a in arrays],
    }
    lists = {
        name: pyarrow.ListArray.from_arrays(
            starts, pyarrow.array(np.concatenate(values)).cast(_LISTS[name], safe=False)
        )
        for name, values in columns.items()
    }
    plain = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema([f for f in SCHEMA if f.name not in lists]))
    return pyarrow.table({**dict(zip(plain.column_names, plain.columns)), **lists}, schema=SCHEMA)


def list_groups(path: Path) -> list[tuple[int, int, bool]]:
    """(group id, step, whether thinking was interrupted in one of its completions) of every group, in order.

    Raises ValueError naming the file if it is not Parquet with these columns.
    """
    groups: dict[tuple[int, int], bool] = {}
    for row in _read(path, ["group_id", "step", "interrupted"], None):
        key = row["group_id"], row["step"]
        groups[key] = groups.get(key, False) or row["interrupted"]
    return [(group_id, step, interrupted) for (group_id, step), interrupted in groups.items()]


def read_group(path: Path, group_id: int) -> dict[str, Any]:
    """A group with the names of `types.RolloutGroup`, and `step`. Raises ValueError naming the file."""
    rows = sorted(_read(path, None, [("group_id", "=", group_id)]), key=lambda row: int(row["index"]))
    return {
        "group_id": group_id,
        "step": rows[0]["step"],
        "epoch": rows[0]["epoch"],
        "prompt": {
            "prompt_id": rows[0]["prompt_id"],
            "text": rows[0]["prompt"],
            "answer": rows[0]["answer"],
            "token_ids": rows[0]["prompt_token_ids"],
        },
        "scores": [{name: row[name] for name in ("correct", "reward", "reason")} for row in rows],
        "rollouts": [
            {
                **{name: row[name] for name in ("token_ids", "loss_mask", "interrupted", "truncated")},
                **{name: row[name] for name in ("thinking_cut", "seed")},
                "rollout_logprobs": row["logprobs"],
                "policy_versions": row["versions"],
            }
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
