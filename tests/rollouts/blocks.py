"""A block of the rollout store."""

from rollout_groups import rollout

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.rollouts.store import GroupHeader, block_bytes
from megatron_scalerl.types import Prompt, Score


def block(group_id, completions=2, tokens=3):
    """A block, its header and its completions."""
    rollouts = [
        rollout(tokens=range(i, i + tokens), mask=[n != 1 for n in range(tokens)]) for i in range(completions)
    ]
    data = tuple(map(rollout_bytes.write, rollouts))
    header = GroupHeader(
        prompt=Prompt(prompt_id=f"p{group_id}", text="é", answer="3", token_ids=(1, 2), extra={"n": 2**70}),
        epoch=1,
        first_token_version=0,
        lost_completions=0,
        scores=tuple(Score(correct=False, reward=-0.1) for _ in data),
        completions=tuple(rollout_bytes.facts_of(rollout_bytes.read(c)) for c in data),
    )
    return block_bytes(group_id, header, data), header, data
