"""The columns of a group's tokens that its algorithm asks for, before the group is stored."""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.batching.rollout_bytes import read, write
from megatron_scalerl.types import RolloutGroup

logger = logging.getLogger(__name__)
PAUSES_S = (1.0, 4.0, 15.0, 60.0)
"""Pauses between the tries: a judge or teacher that is down for a minute ends no run."""


async def with_columns(algorithm: ScaleRL, group: RolloutGroup, samples: Sequence[bytes]) -> list[bytes]:
    """The samples of a group, as `rollout_bytes.write` writes them, with the columns of `ScaleRL.score`.

    Raises RuntimeError, which ends the run, where `score` raised in each try, or gave other columns.
    """
    arrays = [read(sample) for sample in samples]
    for pause_s in (*PAUSES_S, None):
        try:
            columns = await algorithm.score(group, arrays)
            break
        except Exception as error:
            if pause_s is None:
                raise RuntimeError(
                    f"algorithm: score of group {group.group_id} failed {len(PAUSES_S) + 1} times"
                ) from error
            logger.warning("algorithm: score of group %d failed and is tried again: %r", group.group_id, error)
            await asyncio.sleep(pause_s)
    if len(columns) != len(arrays) or any({*names} != {*algorithm.columns} for names in columns):
        raise RuntimeError(
            f"algorithm: score gave columns {[sorted(names) for names in columns[:2]]} of {len(columns)} samples; it "
            f"has to give {sorted(algorithm.columns)} of each of {len(arrays)}"
        )
    scored = []
    for sample, named in zip(arrays, columns):
        values = {name: np.asarray(named[name], np.float32) for name in algorithm.columns}
        try:
            scored.append(write(replace(sample, columns=values)))
        except ValueError as error:
            raise RuntimeError(f"algorithm: score of group {group.group_id}: {error}") from None
    return scored
