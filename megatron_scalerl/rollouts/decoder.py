"""A decoder process: `python -m megatron_scalerl.rollouts.decoder`, started and killed by `rollouts.decoder_pool`.

It turns the responses of engines into completions: bytes for the store (`batching.rollout_bytes`), facts for the
controller, text for the verifier. Its frames (`processes.worker`):

    setup      Setup
    request    Job, body of the response
    reply      Reply, bytes of the completion

It imports no torch, and no transformers where the policy's tokenizer is one of the package `tokenizers`.
"""

import signal
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from megatron_scalerl.batching.rollout_bytes import facts_of, write
from megatron_scalerl.engine.answers import EngineError, completion
from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.processes.worker import Answer, serve
from megatron_scalerl.record import record
from megatron_scalerl.rewards.math import extract_answer
from megatron_scalerl.types import Completion, CompletionLost


@record
class AnswerFormat:
    """The rule by which the answer of a completion is found. Produced by `rollouts.plans`."""

    plan: Plan | None
    """Any interruption plan of the run: its closing tag ends thinking. None for a policy that thinks in no tags."""
    think_end: str
    """The closing tag as text."""
    hidden_ids: frozenset[int]
    """Tokens that are not part of the text: special tokens and those that end a completion."""

    def answer_text(self, token_ids: np.ndarray, decode: Callable[[Sequence[int]], str]) -> str | None:
        """The text after thinking, the whole text of a policy without tags; None if thinking did not end.

        token_ids: [T] the completion. decode: token ids to text, special tokens included.
        """
        start = 0
        if self.plan is not None:
            thinking_end = self.plan.thinking_end(token_ids)
            if thinking_end is None:
                return None
            # the tag's tokens may include neighboring text, so decode them too and cut the tag off as text
            start = thinking_end - len(self.plan.think_end_ids)
        text = decode([token for token in token_ids[start:].tolist() if token not in self.hidden_ids])
        if self.plan is None:
            return text
        return extract_answer(text, self.think_end)


@record
class Setup:
    """The settings of all jobs of a run."""

    answer: AnswerFormat
    tokenizer: str | None
    """tokenizer.json of the policy; None if it has none: transformers then loads the tokenizer from `policy`."""
    policy: str
    """Hugging Face folder of the policy."""


@record
class Job:
    """A response to decode; its body follows."""

    plan: Plan | None
    """The request's interruption plan."""
    seed: int
    """The number drawn for the completion."""
    where: str
    """Engine and path, for errors."""


@record
class Reply:
    """The result of a job; the bytes of the completion follow, if there is one."""

    completion: Completion | None = None
    text: str | None = None
    """Text after thinking; None if thinking did not end or the completion is truncated."""
    engine_error: str | None = None
    """Message of an EngineError."""
    lost: str | None = None
    """Message of a CompletionLost."""
    lost_reason: str = ""


class Decoding:
    """Answers jobs."""

    def __init__(self, setup_json: bytes):
        setup = msgspec.json.decode(setup_json, type=Setup)
        self._format = setup.answer
        self._text = _text_decoder(setup)
        self._job = msgspec.json.Decoder(Job)

    def __call__(self, head: bytes, body: bytes) -> Answer:
        """The reply to a job and the bytes of the completion."""
        job = self._job.decode(head)
        try:
            arrays = completion(body, plan=job.plan, seed=job.seed, where=job.where)
        except EngineError as error:
            return Answer(head=Reply(engine_error=str(error)))
        except CompletionLost as lost:
            return Answer(head=Reply(lost=str(lost), lost_reason=lost.reason))
        text = None
        if not arrays.truncated:  # a truncated completion counts as wrong, whatever it says
            text = self._format.answer_text(arrays.token_ids, self._text)
        return Answer(head=Reply(completion=facts_of(arrays), text=text), body=write(arrays))


def _text_decoder(setup: Setup) -> Callable[[Sequence[int]], str]:
    """Token ids to text: all tokens, with every space."""
    if setup.tokenizer is not None:
        from tokenizers import Tokenizer

        fast = Tokenizer.from_str(setup.tokenizer)
        return lambda ids: str(fast.decode(ids, skip_special_tokens=False))
    from megatron_scalerl.prompts.tokenizer import load_tokenizer  # imports transformers

    slow = load_tokenizer(setup.policy)
    return lambda ids: str(slow.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def main() -> None:
    """Decode until the controller ends this process."""
    # signals to the whole group are the controller's: it may still need completions to save
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    serve(Decoding)


if __name__ == "__main__":
    main()
