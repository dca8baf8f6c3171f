"""Reads a group of completions for the page: facts about each completion, or one completion token by token.

The rollout store has the engine's log-probability, the policy version and the loss mask of each token. The trainer's
log-probability and entropy of each token are known for completions that the trainer scored
(telemetry.token_scores_every). The advantages of a batch, and the reason why the algorithm dropped a group, come from
the record that the controller wrote with the batch.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from itertools import chain
from pathlib import Path
from typing import Any

from megatron_scalerl.page.groups import GroupIndex
from megatron_scalerl.processes.logs import printable
from megatron_scalerl.rollouts.group_files import spans
from megatron_scalerl.rollouts.history import BatchRecord
from megatron_scalerl.rollouts.run_text import RunTokenizer, decode, load_tokenizer, raw_text
from megatron_scalerl.rollouts.token_scores import CompletionScores, read_scores
from megatron_scalerl.rollouts.trained import read_trained

LONGEST_CHARACTER = 4
"""Most tokens into which a tokenizer splits one character: a character has at most four bytes in UTF-8."""


class Reader:
    """Reads groups and completions of a run for the page. Not safe for several threads."""

    def __init__(self, run_dir: Path, recipe: Mapping[str, Any], index: GroupIndex):
        """recipe: the run's recipe (`recipe.file.read_run_recipe`)."""
        self.index = index
        self._run_dir = run_dir
        self._recipe = recipe
        # the group that was read last is kept: the page reads the completions of this group next
        self._fields = lru_cache(1)(lambda group_id, _record: index.read(group_id))

    @cached_property
    def _tokenizer(self) -> RunTokenizer:
        return load_tokenizer(self._run_dir)

    def group(self, group_id: int, *, texts: bool = True) -> dict[str, Any]:
        """Prompt, answer, and facts about each completion of a group. texts: add the texts, for the page's search.

        Raises ValueError for a group that is unknown, no longer stored, or damaged.
        """
        record = self.index.record_of(group_id)
        fields = self._fields(group_id, record)
        tokenizer = self._tokenizer
        scored = self._scores(record)
        advantages: Mapping[int, float] = {}
        untrained = "the group is in no batch yet"
        batch: dict[str, Any] = dict.fromkeys(("step", "batch", "policy_version"))
        if record is not None:
            trained = read_trained(self._run_dir, record.batch)
            untrained = "the algorithm left this completion out of the batch"
            if trained is None:
                untrained = "the run has no record of the group's batch"
            else:
                advantages = trained.advantages.get(group_id, {})
                if group_id in trained.dropped:
                    untrained = f"the algorithm left its group out of the batch: {trained.dropped[group_id]}"
            batch = {"step": record.step, "batch": record.batch, "policy_version": record.policy_version}
        completions = []
        for i, (rollout, score) in enumerate(zip(fields["rollouts"], fields["scores"])):
            sample = (group_id, min(rollout["parts"]))
            facts = _facts(i, rollout, score) | {
                "advantage": None,
                "untrained": "",
                "scored": sample in scored,
            }
            if sample[1] in advantages:
                facts["advantage"] = round(advantages[sample[1]], 4)
            else:
                facts["untrained"] = untrained
            if texts:
                facts["text"] = decode(tokenizer, rollout["token_ids"])
            completions.append(facts)
        prompt = fields["prompt"]
        correct = sum(score["correct"] for score in fields["scores"])
        return {
            "id": group_id,
            **batch,
            "epoch": fields["epoch"],
            "task": printable(prompt.get("task") or ""),
            "prompt": decode(tokenizer, prompt["token_ids"]),
            "answer": printable(str(prompt["answer"])),
            "pass_rate": correct / len(fields["scores"]),
            "completions": completions,
        }

    def completion(self, group_id: int, position: int) -> dict[str, Any]:
        """One completion of T tokens: `pieces` (text), `ids` and `logprobs`, each a list of T values, and `spans`.

        A span is (first token, policy version, origin); `group_files.spans` defines the origin. `parts` has the first
        token of each part of an episode. `mismatch` (trainer minus engine, nats) and `entropies` are None for a
        completion that the trainer did not score. Raises ValueError where `group` does, and if the group has no
        completion `position`.
        """
        record = self.index.record_of(group_id)
        rollouts = self._fields(group_id, record)["rollouts"]
        if not 0 <= position < len(rollouts):
            raise ValueError(
                f"completion: group {group_id} has no completion {position}; the last is {len(rollouts) - 1}"
            )
        rollout = rollouts[position]
        ids = rollout["token_ids"]
        labels = []
        pieces = []
        # the tokens are decoded span by span, so that the text of a forced phrase does not join sampled text
        for first, end, _, version, origin in spans(rollout):
            labels.append((first, version, origin))
            pieces += token_texts(self._tokenizer, ids[first:end])
        logprobs = rollout["rollout_logprobs"]
        scores = self._scores(record)
        rows = [scores[group_id, sample] for sample in rollout["parts"] if (group_id, sample) in scores]
        trainers = list(chain.from_iterable(row.logprobs for row in rows))
        entropies = list(chain.from_iterable(row.entropies for row in rows))
        if rows and not len(trainers) == len(entropies) == len(logprobs):
            raise ValueError(
                f"group {group_id}: completion {position} has {len(logprobs)} tokens, and {len(trainers)} scores"
            )
        return {
            "pieces": pieces,
            "ids": list(ids),
            "logprobs": [round(value, 4) for value in logprobs],
            "mismatch": [round(ours - engines, 4) for ours, engines in zip(trainers, logprobs)] or None,
            "entropies": entropies or None,
            "spans": labels,
            "parts": list(rollout["parts"].values()),
        }

    def _scores(self, record: BatchRecord | None) -> dict[tuple[int, int], CompletionScores]:
        """(group, index of a completion) -> the trainer's scores of the completion's tokens, for the batch of
        `record`. Raises ValueError for a damaged file."""
        return {} if record is None else read_scores(self._run_dir, record.step)


def token_texts(tokenizer: RunTokenizer, token_ids: Sequence[int]) -> list[str]:
    """The text that each token adds to a completion [T], with control characters escaped.

    The joined texts are nearly the text that `decode` returns for all tokens. A token that ends within a character
    adds no text, and the token that completes a character adds the character.
    """
    texts = []
    begin = 0
    read = 0
    for end in range(1, len(token_ids) + 1):
        prefix = raw_text(tokenizer, token_ids[begin:read])
        text = raw_text(tokenizer, token_ids[begin:end])
        # a decoder writes U+FFFD for a character whose bytes are not complete
        if end < len(token_ids) and text.endswith("\ufffd") and end - read < LONGEST_CHARACTER:
            texts.append("")
            continue
        texts.append(printable(text[len(prefix) :]))
        # the next token is decoded with the preceding text, since a tokenizer may decode two tokens together to
        # another text
        begin = read
        read = end
    return texts


def _facts(index: int, rollout: Mapping[str, Any], score: Mapping[str, Any]) -> dict[str, Any]:
    sampled = [p for p, counts in zip(rollout["rollout_logprobs"], rollout["loss_mask"]) if counts]
    versions = rollout["policy_versions"] or [0]
    logprob = round(sum(sampled) / len(sampled), 4) if sampled else None
    return {
        "index": index,
        "reward": score["reward"],
        "correct": score["correct"],
        "reason": printable(score["reason"]),
        "tokens": len(rollout["token_ids"]),
        "turns": rollout["turns"],
        "environment_tokens": rollout["environment_tokens"],
        "sampled": len(sampled),
        "versions": [versions[0], versions[-1]],
        "interrupted": rollout["interrupted"],
        "truncated": rollout["truncated"],
        "thinking_cut": rollout["thinking_cut"],
        "seed": rollout["seed"],
        "logprob": logprob,
    }
