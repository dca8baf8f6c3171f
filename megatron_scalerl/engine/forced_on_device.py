"""Forced interruption in vLLM's V2 model runner, which keeps tokens on the device only (vLLM 0.32.0, v1/worker/gpu).

    validate_params (server) --> add_request: a plan enters a slot --> apply_staged_writes: the slot's row is written
    --> apply, once per step: finds rows whose thinking ends, and forces tokens

The rules are those of `engine.interruption.Forcing`, applied to all rows of a batch at once. The host waits for the
device only when a request enters a slot. vLLM's server process also loads the class, to validate requests.
"""

from typing import Any, ClassVar

import torch
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.logits_processor.interface import (
    LogitsContext,
    LogitsProcessor,
    LogitsProcRequestState,
)

from megatron_scalerl.engine.interruption import Plan

_CUT, _ANSWER_BUDGET, _WHOLE_BUDGET, _ANSWER_START, _BUDGET_END = range(5)
"""Columns of `ForcedTokens._table`, which has a row per request slot: three limits of the interruption plan,
and the indices in the completion at which the answer starts and the budget ends. -1: no limit, or not yet known."""


class ForcedTokens(LogitsProcessor):
    """Forces tokens as the requests' interruption plans say, for all rows of a batch at once.

    All requests of an engine have the same phrase, closing tag and end token.
    """

    _words: ClassVar[tuple[Any, ...] | None] = None

    def __init__(self, vllm_config: Any, req_states: LogitsProcRequestState):
        self._states = req_states
        self._table = torch.full((req_states.max_num_reqs, 5), -1, dtype=torch.int64, device=req_states.device)
        self._new_plans: dict[int, Plan | None] = {}
        self._planned: set[int] = set()
        self._phrase = self._tag = torch.empty(0)
        self._eos = -1

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Check the plan of a request; the server answers a ValueError with status 400.

        Raises ValueError for an invalid plan, and if phrase, closing tag or end token differ from an earlier plan's.
        """
        plan = Plan.from_extra_args(sampling_params.extra_args)
        if plan is not None:
            words = _words(plan)
            cls._words = cls._words or words
            if words != cls._words:
                raise ValueError("extra_args: this engine has forced another phrase, closing tag or end token before")

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Keep the plan of the request that enters slot `req_idx`; returns whether the request has a plan."""
        plan = Plan.from_extra_args(sampling_params.extra_args)
        self._new_plans[req_idx] = plan
        return plan is not None

    def apply_staged_writes(self) -> None:
        """Write the table rows of slots that requests have entered since the last call.

        A request that enters again after a preemption already has tokens, in which the end of thinking is searched.
        """
        if not self._new_plans:
            return
        rows = []
        for slot, plan in self._new_plans.items():
            if plan is None:
                self._planned.discard(slot)
                rows.append([-1] * 5)
            else:
                self._planned.add(slot)
                rows.append(self._row(slot, plan))
        device = self._states.device
        slots = torch.tensor(list(self._new_plans), device=device)
        self._table[slots] = torch.tensor(rows, dtype=torch.int64, device=device)
        self._new_plans.clear()

    def _row(self, slot: int, plan: Plan) -> list[int]:
        if self._eos < 0:
            self._take_words(plan)
        first, end = (int(length.np[slot]) for length in (self._states.prompt_len, self._states.prefill_len))
        row = [plan.cut, plan.answer_budget, plan.whole_budget or -1, -1, -1]
        if end > first:
            tokens = self._states.all_token_ids.gpu[slot, first : min(end, first + plan.cut)].cpu().numpy()
            start = plan.thinking_end(tokens)
            forced = start is None and end - first > plan.cut
            if forced:
                start = plan.cut + len(plan.phrase_ids)
            if start is not None:
                row[_ANSWER_START] = start
                row[_BUDGET_END] = plan.budget_end(start, forced=forced)
        return row

    def _take_words(self, plan: Plan) -> None:
        device = self._states.device
        self._eos = plan.eos_id
        self._phrase = torch.tensor(plan.phrase_ids, dtype=torch.int64, device=device)
        accepted = [{token} for token in plan.think_end_ids]
        accepted[-1] |= plan.think_end_last
        if len(accepted) > 1:
            accepted[0] |= plan.think_end_first
        self._tag = torch.zeros(len(accepted), self._states.vocab_size, dtype=torch.bool)
        for mask_row, tokens in zip(self._tag, accepted):
            mask_row[sorted(tokens)] = True
        self._tag = self._tag.to(device)

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Force tokens: in each row whose next token is forced, all logits but the forced token's become -inf.

        logits: [rows, vocabulary].
        """
        if not self._planned.intersection(ctx.idx_mapping_np.tolist()):
            return logits
        slots = ctx.expanded_idx_mapping.long()
        row = self._table[slots]
        cut = row[:, _CUT]
        start = row[:, _ANSWER_START]
        # [rows] number of tokens of each completion so far
        length = ctx.pos + 1 - self._states.prompt_len.gpu[slots]
        width = len(self._tag)
        # Positions before the start of the text become 0; `length >= width` below discards matches across the prompt.
        positions = ctx.pos[:, None] + torch.arange(1 - width, 1, device=logits.device)
        last = self._states.all_token_ids.gpu[slots[:, None], positions.clamp(min=0)].long()
        closed = self._tag[torch.arange(width, device=logits.device), last].all(dim=1)
        thinking = (cut >= 0) & (start < 0)
        natural = thinking & closed & (length >= width) & (length <= cut)
        forced = thinking & ~natural & (length == cut)
        whole_budget = row[:, _WHOLE_BUDGET]
        answer_budget = row[:, _ANSWER_BUDGET]
        after_phrase = cut + len(self._phrase)
        row[:, _ANSWER_START] = torch.where(natural, length, torch.where(forced, after_phrase, start))
        row[:, _BUDGET_END] = torch.where(
            natural,
            torch.where(whole_budget < 0, length + answer_budget, whole_budget),
            torch.where(forced, after_phrase + answer_budget, row[:, _BUDGET_END]),
        )
        self._table[slots] = row
        start = row[:, _ANSWER_START]
        in_phrase = (cut >= 0) & (start >= 0) & (length < start)
        phrase = self._phrase[(length - cut).clamp(0, len(self._phrase) - 1)]
        must = in_phrase | ((cut >= 0) & (start >= 0) & (length >= row[:, _BUDGET_END]))
        token = torch.where(in_phrase, phrase, self._eos)
        logits.masked_fill_(must[:, None], float("-inf"))
        value = torch.where(must, 0.0, logits.gather(1, token[:, None])[:, 0])
        return logits.scatter_(1, token[:, None], value[:, None].to(logits.dtype))


def _words(plan: Plan) -> tuple[Any, ...]:
    return plan.phrase_ids, plan.think_end_ids, plan.think_end_first, plan.think_end_last, plan.eos_id
