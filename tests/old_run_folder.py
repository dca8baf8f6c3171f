"""Turns a run's folder into one as earlier versions wrote it: groups as JSON lines, events that name their file."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.checkpoints.commit import committed, read_commit, write_commit
from megatron_scalerl.checkpoints.jsonl import read_jsonl, rewrite
from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.rollouts.store import read_block, segment_path


def to_old_folder(run_dir: Path, groups_per_file: int = 1024) -> None:
    """Rewrite groups, events, validations and the controller's state of checkpoints; segments are deleted."""
    folder = run_dir / "rollouts"
    rows: dict[str, list[dict]] = {}
    for event in read_history(run_dir).events:
        if stored := getattr(event, "stored", None):
            block = read_block(segment_path(folder, stored.segment), stored)
            row = {
                "group_id": block.group_id,
                "prompt": block.header.prompt,
                "rollouts": [rollout_bytes.rollout_of(rollout_bytes.read(c)) for c in block.completions],
                "scores": block.header.scores,
                "first_token_version": block.header.first_token_version,
                "epoch": block.header.epoch,
                "lost_completions": block.header.lost_completions,
            }
            rows.setdefault(file_of(block.group_id, groups_per_file), []).append(row)
    for name, groups in rows.items():
        rewrite(folder / name, groups, private=True)
    for path in folder.glob("segment-*"):
        path.unlink()
    rewrite(
        run_dir / "journal.jsonl", [_old_event(e, groups_per_file) for e in read_jsonl(run_dir / "journal.jsonl")]
    )
    rewrite(run_dir / "validation.jsonl", [_old_validation(r) for r in read_jsonl(run_dir / "validation.jsonl")])
    for _, path in committed(run_dir / "checkpoints"):
        facts = {key: value for key, value in read_commit(path).items() if key not in ("files", "sha256")}
        state = json.loads((path / "controller.json").read_bytes())
        (path / "controller.json").write_bytes(
            msgspec.json.encode({k: state[k] for k in ("step", "batches", "run_id")})
        )
        write_commit(path, facts)


def file_of(group_id: int, groups_per_file: int = 1024) -> str:
    return f"groups-{group_id // groups_per_file:05d}.jsonl"


def _old_validation(row: dict) -> dict:
    old = {"compute": "gpu_hours", "compute_total": "gpu_hours_total"}
    return {old.get(key, key): value for key, value in row.items() if key != "unit"}


def _old_event(event: dict, groups_per_file: int) -> dict:
    if event["event"] != "finish":
        return event
    kept = {key: event[key] for key in ("event", "group_id", "prompt_id", "pass_rate", "first_token_version")}
    return kept | {"file": file_of(event["group_id"], groups_per_file)}
