"""Forced interruption for vLLM's V2 model runner: the same tokens as the rules of `Forcing`, for a batch of slots.

vLLM's V2 runner needs a GPU. Its data classes and its loader are real here; its device buffers are tensors.
"""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor import build_custom_logits_processors_params_validator
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcRequestState

from megatron_scalerl.engine.forced_on_device import ForcedTokens
from megatron_scalerl.engine.interruption import Forcing, Plan
from megatron_scalerl.engine.options import DEVICE_PROCESSOR

SLOTS, LENGTH, VOCABULARY, EOS = 6, 64, 9, 0


class Runner:
    """Slots of a V2 runner: requests enter, sample in any order of rows, are preempted and return."""

    def __init__(self):
        self.tokens = torch.zeros(SLOTS, LENGTH, dtype=torch.int32)
        self.prompt, self.prefill = torch.zeros(SLOTS, dtype=torch.int32), torch.zeros(SLOTS, dtype=torch.int32)
        lengths = [SimpleNamespace(gpu=t, np=t.numpy()) for t in (self.prompt, self.prefill)]
        state = LogitsProcRequestState(
            device=torch.device("cpu"),
            max_num_reqs=SLOTS,
            vocab_size=VOCABULARY,
            all_token_ids=SimpleNamespace(gpu=self.tokens),
            prompt_len=lengths[0],
            prefill_len=lengths[1],
            total_len=SimpleNamespace(gpu=None),
        )
        self.processor = ForcedTokens(None, state)

    def enter(self, slot, prompt, completion, plan):
        self.tokens[slot] = VOCABULARY - 1  # what the slot's last request left
        both = prompt + completion
        self.tokens[slot, : len(both)] = torch.tensor(both)
        self.prompt[slot], self.prefill[slot] = len(prompt), len(both)
        params = SamplingParams(extra_args=None if plan is None else plan.to_extra_args())
        assert self.processor.add_request(slot, params) == (plan is not None)

    def step(self, slots, lengths, logits):
        """lengths: tokens of each slot, prompt included."""
        self.processor.apply_staged_writes()
        rows = torch.tensor(slots)
        context = LogitsContext(
            expanded_idx_mapping=rows.int(),
            idx_mapping=rows.int(),
            idx_mapping_np=np.array(slots),
            expanded_local_pos=torch.zeros_like(rows),
            input_ids=rows,
            pos=torch.tensor(lengths) - 1,
            seq_lens_upper_bound_np=np.array(lengths),
        )
        return self.processor.apply(logits, context)


def forced_in(row, before):
    """The token that this row of logits forces; None if it was left as it was."""
    if torch.equal(row, before):
        return None
    allowed = (row > float("-inf")).nonzero().flatten().tolist()
    assert len(allowed) == 1 and row[allowed[0]] == 0
    return allowed[0]


WORDS = [
    {"phrase_ids": (3, 4), "think_end_ids": (4,)},
    {"phrase_ids": (5, 1, 2), "think_end_ids": (1, 2)},
    {
        "phrase_ids": (1, 2, 3),
        "think_end_ids": (1, 2, 3),
        "think_end_first": frozenset({5}),
        "think_end_last": frozenset({6, 7}),
    },
    {"phrase_ids": (2, 1, 1), "think_end_ids": (1, 1), "think_end_last": frozenset({3})},
]


@pytest.mark.parametrize("seed", range(40))
def test_the_same_tokens_as_the_rules(seed):
    rng = random.Random(seed)
    words = WORDS[seed % len(WORDS)]
    runner, requests = Runner(), {}
    seen = set()
    for _ in range(300):
        for slot in set(range(SLOTS)) - requests.keys():
            cut, answer = rng.randint(1, 8), rng.randint(1, 5)
            whole = rng.choice([None, cut + answer + rng.randint(0, 4)])
            plan = Plan(cut=cut, answer_budget=answer, whole_budget=whole, eos_id=EOS, **words)
            plan = rng.choice([plan, plan, plan, None])
            requests[slot] = (plan, [rng.randrange(1, 8) for _ in range(rng.randint(1, 5))], [])
            runner.enter(slot, requests[slot][1], [], plan)
        slots = rng.sample(sorted(requests), rng.randint(1, SLOTS))
        logits = torch.randn(len(slots), VOCABULARY)
        lengths = [len(requests[slot][1]) + len(requests[slot][2]) for slot in slots]
        found = runner.step(slots, lengths, logits.clone())
        for slot, row, before in zip(slots, found, logits):
            plan, prompt, tokens = requests[slot]
            expected = None if plan is None else Forcing(plan).next_token(tokens)
            assert forced_in(row, before) == expected, (plan, tokens)
            seen.add("plain" if expected is None else "end" if expected == EOS else "phrase")
            tokens.append(rng.randrange(1, 8) if expected is None else expected)
            runner.tokens[slot, len(prompt) + len(tokens) - 1] = tokens[-1]
            if tokens[-1] == EOS or len(tokens) > 40:
                del requests[slot]
            elif rng.random() < 0.1:  # preempted: back in a slot with what it has
                runner.enter(slot, prompt, tokens, plan)
    assert seen == {"plain", "end", "phrase"}


def test_vllm_loads_it_and_refuses_what_it_cannot_force(monkeypatch):
    monkeypatch.setattr(ForcedTokens, "_words", None)
    validate = build_custom_logits_processors_params_validator([f"{DEVICE_PROCESSOR}:ForcedTokens"])
    plan = Plan(cut=2, answer_budget=1, eos_id=EOS, phrase_ids=(3, 4), think_end_ids=(4,))
    validate(SamplingParams(extra_args=plan.to_extra_args()))
    validate(SamplingParams())
    other = Plan(cut=2, answer_budget=1, eos_id=EOS, phrase_ids=(5, 4), think_end_ids=(4,))
    with pytest.raises(VLLMValidationError, match="has forced another phrase"):
        validate(SamplingParams(extra_args=other.to_extra_args()))
    with pytest.raises(VLLMValidationError, match="is not an interruption plan"):
        validate(SamplingParams(extra_args={"msrl_interruption": {"cut": 0}}))
