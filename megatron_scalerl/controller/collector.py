"""What the Prometheus endpoint exports, read from the run at the moment of a scrape.

Device-seconds come from the ledger, which a restart continues, so that these counters never fall. All other counters
begin at 0 with the process of the controller, which Prometheus' `rate` and `increase` expect of a restart. Numbers of
the last step and the last validation are absent until this process has made one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_scalerl.engine.membership import EngineState, Member

PREFIX = "scalerl"
SUMMED = ("tokens", "weight_bytes")
"""Keys of a step's record whose values are added up, as are those that end in `_seconds`."""


class RunCollector(Collector):
    """The run as metric families; also a sink of step records and validations (`controller.metrics`).

    All methods run in the controller's event loop.
    """

    def __init__(self, *, run: str, run_id: str, planned_steps: int, device: str) -> None:
        """run: the recipe's name. device: what a device is, gpu or process."""
        self.members: Callable[[], Sequence[Member]] = lambda: ()
        """The engines, once there are some."""
        self._info = {"run": run, "run_id": run_id, "device": device}
        self._planned = planned_steps
        self._device_seconds: Callable[[], Mapping[str, float]] = dict
        self._attempts, self._step = 0, 0
        self._last: dict[str, float] = {}
        self._sums: dict[str, float] = defaultdict(float)
        self._updates = self._steps = self._skipped = 0
        self._generated = 0.0
        self._validated: int | None = None
        self.registry = CollectorRegistry()
        self.registry.register(self)
        ProcessCollector(registry=self.registry)

    def attempt(self, step: int, device_seconds: Callable[[], Mapping[str, float]]) -> None:
        """An attempt begins at `step`. device_seconds: role -> seconds that the run held devices for it so far."""
        self._attempts += 1
        self._step, self._device_seconds = step, device_seconds

    def write(self, step: int, scalars: Mapping[str, float]) -> None:
        """Take over the record of a batch or of a validation. scalars: its finite numbers, as the other sinks get."""
        self._last.update(scalars)
        if "validation/pass_rate" in scalars:
            self._validated = step
            return
        self._step = step
        for key, value in scalars.items():
            if key.endswith("_seconds") or key in SUMMED:
                self._sums[key] += max(0.0, value)
        self._generated += scalars.get("generated_tokens_per_second", 0.0) * scalars.get("step_seconds", 0.0)
        self._skipped += "skipped" in scalars
        self._steps += "skipped" not in scalars
        self._updates += "weight_bytes" in scalars

    def close(self) -> None:
        """An attempt has ended: its last numbers stay."""

    def collect(self) -> Iterable[Metric]:
        """Every family, in the order of the page."""
        info = GaugeMetricFamily(
            f"{PREFIX}_run_info", "1; the labels name the run and what a device is.", labels=list(self._info)
        )
        info.add_metric(list(self._info.values()), 1)
        yield info
        yield _gauge("step", "Optimizer steps of the policy.", self._step)
        yield _gauge("planned_steps", "Optimizer steps of the recipe.", self._planned)
        yield from self._of_records()
        seconds = CounterMetricFamily(
            f"{PREFIX}_device_seconds",
            "Device-seconds that the run held, by role of the ledger, in all attempts.",
            labels=["role"],
        )
        for role, held in self._device_seconds().items():
            seconds.add_metric([role], held)
        yield seconds
        yield from self._of_engines()
        yield _counter(
            "trainer_restarts", "Starts of the trainer's ranks after the first.", max(0, self._attempts - 1)
        )

    def _of_records(self) -> Iterator[Metric]:
        """By one rule: every number of a record under its key."""
        last = GaugeMetricFamily(
            f"{PREFIX}_last",
            "The numbers of the last line of metrics.jsonl by key; those of the last validation as validation/KEY.",
            labels=["key"],
        )
        sums = CounterMetricFamily(
            f"{PREFIX}_sum",
            "Sums over the lines of metrics.jsonl since the controller started, by key: seconds, tokens, bytes.",
            labels=["key"],
        )
        for family, values in ((last, self._last), (sums, self._sums)):
            for key, value in values.items():
                family.add_metric([key], value)
            yield family
        if self._validated is not None:
            yield _gauge("validation_step", "Optimizer step of the last validation.", self._validated)
        yield _counter("generated_tokens", "Tokens of finished completions, validation included.", self._generated)
        yield _counter("batches", "Batches with an optimizer step.", self._steps)
        yield _counter("skipped_batches", "Batches of which the filters left nothing.", self._skipped)
        yield _counter("weight_updates", "Weight updates after a step.", self._updates)

    def _of_engines(self) -> Iterator[Metric]:
        members = self.members()
        states = GaugeMetricFamily(f"{PREFIX}_engines", "Engines by state.", labels=["state"])
        for state in EngineState:
            states.add_metric([state.value], sum(member.state is state for member in members))
        yield states
        given_up = sum(member.given_up for member in members)
        yield _gauge("engines_given_up", "Engines that are not started again.", given_up)
        versions = [member.version for member in members if member.version is not None]
        if versions:
            yield _gauge("policy_version", "Newest policy version that an engine holds.", max(versions))
        restarts = CounterMetricFamily(
            f"{PREFIX}_engine_restarts", "Starts of an engine after its first.", labels=["engine"]
        )
        lost = CounterMetricFamily(
            f"{PREFIX}_engine_lost_tokens", "Tokens that evicted servers had generated in vain.", labels=["engine"]
        )
        requests = GaugeMetricFamily(
            f"{PREFIX}_engine_requests", "Generation requests in flight at an engine.", labels=["engine"]
        )
        for member in members:
            restarts.add_metric([member.name], member.restarts)
            lost.add_metric([member.name], member.lost_tokens)
            requests.add_metric([member.name], 0 if member.client is None else member.client.in_flight)
        yield from (restarts, lost, requests)


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}_{name}", text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(f"{PREFIX}_{name}", text, value=value)
