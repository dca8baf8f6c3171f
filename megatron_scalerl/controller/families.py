"""Names of the exported metrics, and which number of a step's or a validation's record each one shows.

Prometheus' conventions: base units (seconds, bytes, tokens, nats, ratios of 1), the unit at the end of the name,
`_total` on counters.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Shown:
    """A number of the records as one sample of a family."""

    family: str
    help: str
    labels: tuple[tuple[str, str], ...] = ()


PREFIX = "scalerl"

LAST = {
    "reward": Shown(family="reward_mean", help="Mean reward of the last batch, before every filter."),
    "train_pass_rate": Shown(
        family="train_pass_ratio",
        help="Share of correct completions in the last batch, before every filter; by task in a mixture.",
        labels=(("task", ""),),
    ),
    "truncated_share": Shown(
        family="truncated_ratio", help="Share of the last batch's completions that a token budget ended."
    ),
    "interrupted_share": Shown(
        family="interrupted_ratio", help="Share of the last batch's completions whose thinking was cut."
    ),
    "completion_tokens_mean": Shown(
        family="completion_mean_tokens", help="Mean length of the last batch's completions."
    ),
    "staleness_mean": Shown(
        family="staleness_mean_steps",
        help="Optimizer steps since the oldest first token of a group, mean over the groups of the last batch.",
    ),
    "staleness_max": Shown(
        family="staleness_max_steps",
        help="Optimizer steps since the oldest first token of a group, maximum over the groups of the last batch.",
    ),
    "mismatch_mean": Shown(
        family="mismatch_mean_nats",
        help="Mean of |trainer - engine log-probability| over the trained tokens of the last step.",
    ),
    "mismatch_max": Shown(
        family="mismatch_max_nats",
        help="Maximum of |trainer - engine log-probability| over the trained tokens of the last step.",
    ),
    "entropy": Shown(family="entropy_nats", help="Mean entropy of the policy per trained token of the last step."),
    "loss": Shown(family="loss", help="Loss of the last step."),
    "grad_norm": Shown(family="gradient_norm", help="Global L2 norm of the last step's gradient before clipping."),
    "learning_rate": Shown(family="learning_rate", help="Learning rate of the last step."),
    "generated_tokens_per_second": Shown(
        family="generated_tokens_per_second",
        help="Tokens of finished completions per second of wall time, over the last batch.",
    ),
    "groups_in_flight": Shown(family="groups_in_flight", help="Groups being generated or scored at the last step."),
    "groups_ready": Shown(family="groups_ready", help="Finished groups in no batch yet at the last step."),
    "validation/pass_rate": Shown(
        family="validation_pass_ratio",
        help="Held-out pass rate of the last validation; by task in a mixture.",
        labels=(("task", ""),),
    ),
}
"""Key of a record -> the gauge that shows its last value. A key with /TASK after it has the label `task`."""

_WAIT = "Seconds of finished batches in which the trainer or all engines waited, by what they waited for."


def _wait(side: str, reason: str) -> Shown:
    return Shown(family="wait_seconds", help=_WAIT, labels=(("side", side), ("reason", reason)))


ADDED = {
    "tokens": Shown(
        family="trained_tokens", help="Tokens of the trained batches with their prompts, without padding."
    ),
    "wait_for_batch_seconds": _wait("trainer", "batch"),
    "send_seconds": _wait("trainer", "sending"),
    "pinned_seconds": _wait("trainer", "validation"),
    "engine_paused_seconds": _wait("engine", "weight_update"),
    "engine_idle_seconds": _wait("engine", "staleness_bound"),
    "weight_bytes": Shown(family="weight_sent_bytes", help="Bytes that the trainer sent in weight updates."),
}
"""Key of a step's record -> the counter that its values are added to, from the start of the controller on."""

PHASE = "weight_{}_seconds"
PHASES = ("needs", "connect", "stage", "pause", "start", "update", "finish", "verify", "resume")
"""Phases of a weight update (`controller.weight_sync`), whose seconds a record has under the key `PHASE`."""
