"""Console output of a run: one line per step and per validation, and a progress bar."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from megatron_scalerl.fit.outlook import Outlook
from megatron_scalerl.types import PassRate

HEADER = " step  reward  pass  stale mean/max  trunc  interr  mismatch  entropy  gen tok/s  waits: trainer engine"


class Progress:
    """Prints a run's progress: on a terminal a line per step and a bar, else a line every `every_steps` steps."""

    def __init__(self, console: Console, steps: int, *, every_steps: int = 5):
        self._console = console
        self._every_steps = 1 if console.is_terminal else every_steps
        self._bar = Bar(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[pass_rate]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("steps", total=steps, pass_rate="")
        self._header_printed = False

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def step(self, step: int, record: Mapping[str, Any]) -> None:
        """Show one optimizer step. record: the step's row of metrics.jsonl."""
        self._bar.update(self._task, completed=step)
        if step % self._every_steps:
            return
        if not self._header_printed:
            self._header_printed = True
            self._console.print(HEADER, style="bold")
        failure_text = ""
        for part in ("verifier", "environment"):
            share = record.get(f"{part}_failed_share", 0.0)
            if share > 0:
                failure_text += f"  {part} failed {share:.3f}"
        self._console.print(
            f"{step:5d}  {record['reward']:+6.3f}  {record['train_pass_rate']:4.2f}"
            f"  {record['staleness_mean']:6.2f} {record['staleness_max']:5.0f}   "
            f"  {record['truncated_share']:5.3f}  {record['interrupted_share']:6.3f}"
            f"  {record['mismatch_mean']:8.5f}  {record['entropy']:7.4f}"
            f"  {record['generated_tokens_per_second']:9.0f}"
            f"  {record['wait_for_batch_seconds'] + record['pinned_seconds']:13.2f}s"
            f" {record['engine_paused_seconds'] + record['engine_idle_seconds']:5.2f}s{failure_text}",
        )

    def skipped(self, step: int, reason: str) -> None:
        """Show a batch without an optimizer step."""
        self._console.print(f"{step:5d}  no optimizer step, as the filters left no sample of the batch: {reason}")

    def outlook(self, forecast: Outlook) -> None:
        """Show the forecast of the run's final pass rate, made after a validation."""
        self._console.print(f"{forecast.step:5d}  forecast {forecast.line()}", style="cyan")

    def validation(self, result: PassRate) -> None:
        """Show one validation."""
        self._bar.update(self._task, pass_rate=f"held-out {result.pass_rate:.3f}")
        entropy = ""
        if result.entropy is not None:
            entropy = f", entropy {result.entropy:.3f}"
        confirmed = ""
        if result.confirmed_share is not None:
            confirmed = f", confirmed {result.confirmed_share:.3f}"
        self._console.print(
            f"{result.step:5d}  held-out pass rate {result.pass_rate:.3f}"
            f"{''.join(f', {task} {part.pass_rate:.3f}' for task, part in result.tasks.items())}"
            f" ({result.prompts} prompts x {result.generations}, {result.mean_completion_tokens:.1f} tokens,"
            f" interrupted {result.interrupted_share:.3f}, truncated {result.truncated_share:.3f}"
            f"{entropy}{confirmed})",
            style="green",
        )
