"""The plan as tables for a terminal."""

from collections.abc import Iterable

from rich.console import Console

from megatron_scalerl.fit import tables
from megatron_scalerl.fit.formatting import money
from megatron_scalerl.fit.tables import Table
from megatron_scalerl.plan.assumptions import described
from megatron_scalerl.plan.hardware import GIB
from megatron_scalerl.plan.planner import RunPlan


def show(plan: RunPlan, console: Console) -> None:
    """Print the whole plan: summary, memory, step, balance, assumptions."""
    sections = [section(plan) for section in (_summary, _trainer, _engine, _step, _balance, _assumptions)]
    tables.show([*sections, *(f"does not fit: {line}" for line in plan.problems())], console)


def _pairs(title: str, *rows: tuple[str, str]) -> Table:
    return Table(title=title, columns=("", ""), rows=rows, labels=2)


def _summary(plan: RunPlan) -> Table:
    p = plan.parameters
    engines = plan.split.engines
    devices = plan.engine.devices
    rows = [("parameters", f"{p.total:,}")]
    if p.experts:
        rows.append(("  active per token", f"{p.active:,}, of which {p.embedding:,} in the embedding"))
    if p.passthrough:
        total = f"{p.total + p.passthrough:,}; layers of multi-token prediction are not loaded"
        rows.append(("  with untrained layers", total))
    generate = f"{engines * devices} generate: {engines} engines of {devices}"
    if plan.recipe.engine.colocate:
        generate = f"the same {generate}"
    origin = _other_split(plan) or "from the recipe"
    rows += [
        ("architecture", plan.config),
        ("split", f"{plan.split.trainer} GPUs train, {generate} (split {origin})"),
        ("memory", fits(plan)),
        ("balance", bottleneck(plan)),
        ("steps per hour", f"{plan.timing.steps_per_hour:,.1f} ({plan.timing.step_seconds:,.1f} s per step)"),
        ("GPU-hours per 1,000 steps", f"{plan.gpu_hours_per_1000_steps:,.0f}{_money(plan)}"),
    ]
    return _pairs(f"{plan.recipe.name} on {plan.gpus} x {plan.gpu.name}", *rows)


def verdict(plan: RunPlan) -> str:
    """The plan in one line: whether it fits, the headroom, the bottleneck, and the cost."""
    cost = f"{plan.gpu_hours_per_1000_steps:,.0f} GPU-hours per 1,000 steps{_money(plan)}"
    parts = [fits(plan), _other_split(plan), bottleneck(plan), cost]
    return "; ".join(filter(None, parts))


def _other_split(plan: RunPlan) -> str:
    """Text with the settings of the planner's split; empty if the recipe's split takes exactly the given GPUs."""
    if plan.split_is_recipes:
        return ""
    return (
        f"chosen by the planner, since the recipe's split takes {plan.recipe.devices} GPUs; set trainer.world_size="
        f"{plan.split.trainer} engine.count={plan.split.engines}"
    )


def _money(plan: RunPlan) -> str:
    return money(plan.gpu_hours_per_1000_steps, plan.recipe.cost.model_dump())


def fits(plan: RunPlan) -> str:
    """The first reason why the plan does not fit; else the memory free on the fullest trainer rank, and the KV
    cache."""
    problems = plan.problems()
    if problems:
        return f"does not fit: {problems[0]}"
    return (
        f"fits: {plan.headroom / GIB:.1f} GiB free on the fullest trainer rank, KV cache of an engine for "
        f"{plan.engine.full_sequences:,.1f} sequences of maximum length"
    )


def bottleneck(plan: RunPlan) -> str:
    """Whether training or generation limits the speed."""
    t = plan.timing
    if plan.recipe.rollouts.schedule == "ppo_off_policy" or plan.recipe.engine.colocate:
        return f"taking turns: the trainer waits {t.trainer_waits:.0%} of the time, engines idle {t.engines_idle:.0%}"
    if t.trainer_waits >= 0.02:
        return f"generation-bound: the trainer waits for batches {t.trainer_waits:.0%} of the time"
    if plan.best and plan.best[0].timing.step_seconds < 0.98 * t.step_seconds:
        return f"trainer-bound: each engine runs {t.running:.0f} of {plan.decoding.running} concurrent completions"
    return "balanced: the trainer hardly waits, and no other split is faster"


def _trainer(plan: RunPlan) -> Table:
    at = plan.layout
    sizes = f"TP {at.tp}, PP {at.pp}, CP {at.cp}, EP {at.ep}, expert TP {at.etp}, DP {at.dp}"
    # Only the first and the last pipeline stage are shown.
    stages = [plan.trainer[0], *plan.trainer[1:][-1:]]
    title = f"trainer rank (GiB): {sizes}, recompute {plan.recompute}"
    if plan.layers != "te":
        title += f", {plan.layers} layers"
    rows = [("parameters of the rank", *(f"{s.parameters.total:,}" for s in stages))]

    def add(name: str, sizes: Iterable[float]) -> None:
        rows.append((name, *(f"{size / GIB:,.2f}" for size in sizes)))

    for name in dict.fromkeys(term.name for s in stages for term in s.terms):
        add(name, (sum(term.bytes for term in s.terms if term.name == name) for s in stages))
    add("peak", (s.total for s in stages))
    if plan.recipe.engine.colocate:
        add("engine on the same device", (plan.engine.total for _ in stages))
    add(f"free of {plan.gpu.memory_bytes / GIB:.1f}", (plan.room - s.total for s in stages))
    return Table(title=title, columns=("", *(f"stage {s.stage}" for s in stages)), rows=tuple(rows))


def _engine(plan: RunPlan) -> Table:
    e = plan.engine
    d = plan.decoding
    rate = d.tokens_per_second(d.running)
    step = d.step_seconds(d.running)
    n = plan.lengths
    used = f"weights {e.weights_bytes / GIB:.1f} + overhead {e.overhead_bytes / GIB:.1f}"
    episodes = []
    if n.replies:
        share = n.waiting / (n.waiting + n.mean * step)
        replies = f"{n.written:,.0f} tokens of its environment and {n.waiting:.1f} s of waiting"
        episodes = [("each episode", f"{replies}, {share:.0%} of its time at full load")]
    lag = max(n.tokens) * step / plan.timing.step_seconds
    return _pairs(
        "engine",
        ("GiB per device", f"{used} + KV cache {e.kv_bytes / GIB:.1f} = {e.used_bytes / GIB:.1f}"),
        ("beside vLLM's share", f"{e.group_bytes / GIB:.2f} GiB for the broadcast groups over which weights arrive"),
        ("KV cache of an engine", f"{e.kv_tokens:,} tokens of {e.kv_bytes_per_token / 1024:,.0f} KiB"),
        (
            "max concurrent sequences",
            f"{e.full_sequences:,.1f} of {e.context_tokens:,} tokens, or {d.running} of mean length",
        ),
        (
            "decode at full load",
            f"{1000 * step:.1f} ms per token: {rate:,.0f} tok/s, {rate / e.devices:,.0f} per GPU",
        ),
        (
            "longest completion",
            f"{lag:.1f} optimizer steps at full load; max staleness is {plan.recipe.rollouts.staleness_bound}",
        ),
        *episodes,
    )


def _step(plan: RunPlan) -> Table:
    w = plan.work
    n = plan.lengths
    u = plan.update
    gb = 1e9
    traffic = f"{u.senders} ranks send up to {u.most_sent / gb:.3g} GB, a worker gets {u.most_received / gb:.3g} GB"
    bounds = [("  at least", f"{seconds:.3f} s: {link}") for link, seconds in plan.update_bounds.items()]
    length = f"mean {n.mean:,.0f}, median {n.quantile(0.5):,}, 90th percentile {n.quantile(0.9):,} tokens"
    packed = f"{w.micro_batches:.1f} micro-batches of {plan.recipe.micro_batch_tokens:,} tokens per rank"
    return _pairs(
        "one step",
        ("completions", f"{w.completions:,}: {length}"),
        ("tokens", f"{w.generated_tokens:,.0f} generated, {w.trained_tokens:,.0f} trained with prompts"),
        ("FLOPs", f"{w.model_flops:.3g} without, {w.hardware_flops:.3g} with recomputation"),
        ("trainer", f"{w.train_seconds:.1f} s; {packed}, pipeline bubble {w.bubble:.0%}"),
        ("weight update", f"{u.bytes / gb:,.1f} GB; engines assumed to pause {plan.publish_seconds:.2f} s"),
        ("  each", traffic),
        *bounds,
    )


def _balance(plan: RunPlan) -> Table:
    columns = ("train s", "step s", "trainer waits", "running", "engines idle", "staleness", "GPU-h/1,000")
    r = plan.recipe.rollouts
    name = f"PPO-off-policy-{r.updates_per_phase}"
    if r.schedule == "pipeline":
        name = f"PipelineRL-{r.max_staleness_steps}"
    splits = [(plan.split, plan.work.train_seconds, plan.timing, " (this)")]
    splits += [(s.split, s.train_seconds, s.timing, "") for s in plan.best[:4] if s.split != plan.split]
    rows = tuple(
        (
            f"{split.trainer} + {split.engines * plan.engine.devices}{note}",
            f"{seconds:.1f}",
            f"{t.step_seconds:.1f}",
            f"{t.trainer_waits:.0%}",
            f"{t.running:.0f}",
            f"{t.engines_idle:.0%}",
            f"{t.staleness_mean:.1f}, max {t.staleness_max}",
            f"{plan.gpus * t.step_seconds / 3.6:,.0f}",
        )
        for split, seconds, t, note in splits
    )
    title = f"balance: GPUs of trainer and engines, simulated {name} queue"
    return Table(title=title, columns=("train + generate", *columns), rows=rows)


def _assumptions(plan: RunPlan) -> Table:
    rows = []
    for f in described():
        if f.name not in plan.sources:
            continue
        value = getattr(plan.assumed, f.name)
        value_text = "computed"
        if value is not None:
            value_text = f"{value:g} {f.metadata['unit']}".strip()
        rows.append(("--" + f.name.replace("_", "-"), value_text, f.metadata["what"], plan.sources[f.name]))
    rows.append(("--gpu", "", plan.gpu.name, plan.gpu.source))
    columns = ("flag", "value", "what", "source")
    return Table(title="assumptions; flags replace the values", columns=columns, rows=tuple(rows), labels=4)
