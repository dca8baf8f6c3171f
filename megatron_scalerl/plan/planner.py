"""The plan of a recipe on a number of GPUs: everything that the command prints, in one object."""

from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from megatron_scalerl.distributed.fused_attention import why_unfused
from megatron_scalerl.models.family import Family
from megatron_scalerl.plan.activations import recompute_of
from megatron_scalerl.plan.assumptions import OF_EPISODES, Assumptions, default_sources
from megatron_scalerl.plan.counting import Parameters, count, load_family
from megatron_scalerl.plan.engine import Decoding, EngineMemory, decoding, engine_memory
from megatron_scalerl.plan.hardware import GIB, Gpu, Kernels, Layers
from megatron_scalerl.plan.memory import RankMemory, trainer_memory
from megatron_scalerl.plan.sharding import Layout, layout_of
from megatron_scalerl.plan.simulate import QueueSettings, Timing, simulate
from megatron_scalerl.plan.split import Simulated, Split, best_splits, gpus_of, queue_of, splits
from megatron_scalerl.plan.update import GROUP_BYTES, UpdateWork, update_work
from megatron_scalerl.plan.work import Lengths, StepWork, assumed_lengths, step_work
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.record import record

COMPLETIONS = 20_000
"""A simulation counts the steps of about this number of completions after the warm-up, and at least ten steps."""


@record
class RunPlan:
    """Memory, time and cost of a recipe. Produced by `make_plan`."""

    recipe: Recipe
    gpu: Gpu
    gpus: int
    assumed: Assumptions
    sources: Mapping[str, str]
    """Field of `Assumptions` -> source of the value, for assumptions that matter to this recipe."""
    layers: Layers
    """Kind of the trainer's layers: Transformer Engine's ("te") or Megatron-Core's own ("plain")."""
    unfused: str
    """The reason why attention is not fused on this GPU; empty for fused attention."""
    config: str
    """File from which the architecture was read."""
    parameters: Parameters
    split: Split
    split_is_recipes: bool
    layout: Layout
    trainer: tuple[RankMemory, ...]
    engine: EngineMemory
    decoding: Decoding
    lengths: Lengths
    work: StepWork
    update: UpdateWork
    publish_seconds: float
    """Assumed pause of the engines for one weight update (seconds)."""
    timing: Timing
    best: tuple[Simulated, ...]
    """The fastest splits of `gpus` into trainer and engines, fastest first."""

    @property
    def recompute(self) -> str:
        """The recipe's recompute settings as text."""
        return str(recompute_of(self.recipe))

    @property
    def gpu_hours_per_1000_steps(self) -> float:
        """GPU-hours of trainer and engines for 1,000 steps, idle time included, validation excluded."""
        return self.gpus * self.timing.step_seconds * 1000 / 3600

    @property
    def room(self) -> float:
        """Bytes of a device that a trainer rank may use."""
        return _room(self.recipe, self.gpu, self.engine)

    @property
    def headroom(self) -> float:
        """Bytes free on the fullest trainer rank; negative if the rank does not fit."""
        return self.room - max(stage.total for stage in self.trainer)

    @property
    def update_bounds(self) -> dict[str, float]:
        """Kind of network link -> lower bound of the time of a weight update (seconds)."""
        rates = {
            "one card per GPU": self.gpu.nic_bytes_per_second,
            "NVLink inside one machine": self.gpu.nvlink_bytes_per_second,
        }
        return {link: self.update.bound_seconds(rate) for link, rate in rates.items()}

    def _advice(self) -> str:
        """Settings to try where a trainer rank does not fit: TP, and recomputation that the recipe does not set."""
        text = "; try a larger megatron.parallel.tensor_model_parallel_size"
        recompute = recompute_of(self.recipe)
        module = "moe" if self.parameters.experts else "mlp"
        if recompute.granularity == "full" or module in recompute.modules:
            return text
        modules = ", ".join([*recompute.modules, module])
        return text + f", or megatron.model.recompute_granularity: selective with recompute_modules: [{modules}]"

    def problems(self) -> list[str]:
        """One line for each reason why the plan does not fit, such as the missing memory of a trainer rank."""
        engine = ""
        if self.recipe.engine.colocate:
            engine = f" and an engine {self.engine.total / GIB:.1f}"
        lines = [
            f"trainer ranks of pipeline stage {s.stage} need {s.total / GIB:.1f} GiB{engine}, {self.gpu.name} has "
            f"{self.gpu.memory_bytes / GIB:.1f}: {(s.total - self.room) / GIB:.1f} GiB are missing"
            for s in self.trainer
            if s.total > self.room
        ]
        if lines:
            lines[0] += self._advice()
        if self.engine.missing_bytes:
            lines.append(
                f"the KV cache of an engine cannot hold one sequence of {self.engine.context_tokens:,} tokens: "
                f"{self.engine.missing_bytes / GIB:.1f} GiB per device are missing"
            )
        if self.engine.devices > self.gpu.per_node:
            lines.append(
                f"engine.devices_per_engine: an engine runs on one node, which has {self.gpu.per_node} GPUs, and "
                f"cannot have {self.engine.devices}"
            )
        if self.unfused:
            lines.append(self.unfused)
        too_much = self.engine.total - self.gpu.memory_bytes
        if too_much > 0:
            lines.append(
                f"engine.vllm.gpu_memory_utilization: vLLM's share and the weight groups' "
                f"{self.engine.group_bytes / GIB:.1f} GiB are {too_much / GIB:.1f} GiB more than a device has"
            )
        return lines


def make_plan(
    recipe: Recipe,
    config: Path,
    gpus: int,
    gpu: Gpu,
    assumed: Assumptions,
    *,
    layers: Layers = "te",
    sources: Mapping[str, str] | None = None,
) -> RunPlan:
    """Plan the recipe's split if it has `gpus` GPUs, else the fastest. Raises ValueError for impossible sizes."""
    family = load_family(config)
    parameters = count(family)
    recipe_split = Split(trainer=recipe.trainer.world_size, engines=recipe.engine.count)
    split_is_recipes = gpus_of(recipe, recipe_split) == gpus
    possible = splits(recipe, gpus, gpu)
    # The memory of the broadcast groups for weights depends on the layout. All splits are compared with the memory of
    # the first split's groups.
    first = recipe_split if split_is_recipes else possible[0]
    update = update_work(recipe, family, layout_of(recipe, family, first.trainer))
    worker_bytes, sender_bytes = (_group_bytes(recipe, groups) for groups in (update.groups, update.sender_groups))
    kernels = Kernels(layers=layers, device="gpu")
    memory_of = partial(trainer_memory, recipe, family, assumed=assumed, kernels=kernels, group_bytes=sender_bytes)
    engine = engine_memory(recipe, family, parameters, gpu, assumed, group_bytes=worker_bytes)
    lengths = assumed_lengths(recipe, assumed)
    speed = decoding(recipe, parameters, engine, gpu, lengths, assumed)
    base = _base(recipe, speed, lengths, _pause(update, gpu, assumed))

    def trainer_of(split: Split) -> _Trainer:
        layout = layout_of(recipe, family, split.trainer)
        work = step_work(recipe, family, parameters, layout, gpu, lengths, assumed)
        memory = memory_of(layout=layout, micro_batches=int(work.micro_batches) + 1)
        return _Trainer(layout=layout, work=work, memory=memory)

    best = _search({split: trainer_of(split) for split in possible}, _room(recipe, gpu, engine), base)
    split = recipe_split if split_is_recipes else best[0].split
    trainer = trainer_of(split)
    timings = {simulated.split: simulated.timing for simulated in best}
    return RunPlan(
        recipe=recipe,
        gpu=gpu,
        gpus=gpus,
        assumed=assumed,
        sources=_counting(recipe, sources or default_sources()),
        layers=layers,
        unfused="" if layers == "plain" else _unfused(recipe, family, gpu, trainer.layout, engine.context_tokens),
        config=str(config / "config.json"),
        parameters=parameters,
        split=split,
        split_is_recipes=split_is_recipes,
        layout=trainer.layout,
        trainer=trainer.memory,
        engine=engine,
        decoding=speed,
        lengths=lengths,
        work=trainer.work,
        update=update if split == first else update_work(recipe, family, trainer.layout),
        publish_seconds=base.publish_seconds,
        timing=timings.get(split) or simulate(queue_of(base, split, trainer.work.train_seconds)),
        best=tuple(best),
    )


def _unfused(recipe: Recipe, family: Family, gpu: Gpu, layout: Layout, longest: int) -> str:
    return why_unfused(
        gpu.capability,
        deterministic=recipe.trainer.deterministic,
        heads=family.transformer["num_attention_heads"] / layout.tp,
        longest=longest,
        sequences=max(1, recipe.micro_batch_tokens // longest),
    )


def _counting(recipe: Recipe, sources: Mapping[str, str]) -> dict[str, str]:
    """The sources of the assumptions that matter to this recipe. `OF_EPISODES` matter only with an environment."""
    return {name: source for name, source in sources.items() if recipe.episodes or name not in OF_EPISODES}


@record
class _Trainer:
    """The trainer's layout, work and memory in one split."""

    layout: Layout
    work: StepWork
    memory: tuple[RankMemory, ...]


def _base(recipe: Recipe, speed: Decoding, lengths: Lengths, publish: float) -> QueueSettings:
    r = recipe.rollouts
    phase = r.batches_per_update
    warm_up = phase
    if r.schedule == "pipeline":
        warm_up = 4 + r.max_staleness_steps
    # Steps are whole phases, because the first and the last step of a phase take different times.
    counted = max(10, COMPLETIONS // (r.groups_per_batch * r.group_size))
    return QueueSettings(
        rollouts=r,
        engines=1,
        decoding=speed,
        lengths=lengths,
        train_seconds=1.0,
        publish_seconds=publish,
        steps=warm_up + -(-counted // phase) * phase,
        warm_up=warm_up,
        takes_turns=recipe.engine.colocate and r.schedule == "pipeline" and r.max_staleness_steps > 0,
    )


def _pause(update: UpdateWork, gpu: Gpu, assumed: Assumptions) -> float:
    """The engines' pause for a weight update (seconds). The planner takes one pause for all splits, since the pauses
    of splits of equally many GPUs hardly differ."""
    if assumed.publish_seconds is not None:
        return assumed.publish_seconds
    return update.bound_seconds(gpu.nic_bytes_per_second / 2)


def _group_bytes(recipe: Recipe, groups: int) -> float:
    """Bytes of the buffers of a sender or worker that is a member of `groups` NCCL broadcast groups; 0 without
    NCCL."""
    if recipe.engine.colocate or recipe.weights.transport not in ("auto", "nccl"):
        return 0
    return groups * GROUP_BYTES


def _room(recipe: Recipe, gpu: Gpu, engine: EngineMemory) -> float:
    """Bytes of a device that a trainer rank may use."""
    if recipe.engine.colocate:
        return gpu.memory_bytes - engine.total
    return gpu.memory_bytes


def _search(trainers: Mapping[Split, _Trainer], room: float, base: QueueSettings) -> list[Simulated]:
    """The fastest splits whose trainer ranks need at most `room` bytes each, or the fastest of all splits if none
    fits."""
    seconds = {split: trainer.work.train_seconds for split, trainer in trainers.items()}
    # If no split fits, all are searched, and the fastest split shows how much memory is missing.
    fitting = {s: seconds[s] for s, t in trainers.items() if max(m.total for m in t.memory) <= room}
    return best_splits(list((fitting or seconds).items()), base)


def as_numbers(plan: RunPlan) -> dict[str, Any]:
    """The plan for --json: every number in the printed tables, sizes in bytes and times in seconds."""
    parts = ("gpu", "parameters", "work", "timing")
    numbers = {part: asdict(getattr(plan, part)) for part in parts}
    return numbers | {
        "recipe": plan.recipe.name,
        "gpus": plan.gpus,
        "config": plan.config,
        "fits": not plan.problems(),
        "problems": plan.problems(),
        "split": asdict(plan.split) | {"devices_per_engine": plan.engine.devices, "of_recipe": plan.split_is_recipes},
        "layout": asdict(plan.layout)
        | {
            "dp": plan.layout.dp,
            "recompute": plan.recompute,
            "layers": plan.layers,
            "micro_batch_tokens": plan.recipe.micro_batch_tokens,
        },
        "trainer_memory": [asdict(s) | {"total": s.total} for s in plan.trainer],
        "trainer_headroom_bytes": plan.headroom,
        "engine_memory": asdict(plan.engine)
        | {"kv_tokens": plan.engine.kv_tokens, "full_sequences": plan.engine.full_sequences},
        "decoding": asdict(plan.decoding)
        | {"tokens_per_second": plan.decoding.tokens_per_second(plan.decoding.running)},
        "completion_tokens": {
            "mean": plan.lengths.mean,
            "median": plan.lengths.quantile(0.5),
            "p90": plan.lengths.quantile(0.9),
            "max": max(plan.lengths.tokens),
        },
        "weight_update": {
            "bytes": plan.update.bytes,
            "senders": plan.update.senders,
            "most_sent_bytes": plan.update.most_sent,
            "most_received_bytes": plan.update.most_received,
            "assumed_seconds": plan.publish_seconds,
            "lower_bounds": plan.update_bounds,
        },
        "gpu_hours_per_1000_steps": plan.gpu_hours_per_1000_steps,
        "cost": plan.recipe.cost.model_dump(),
        "best_splits": [asdict(s) for s in plan.best],
        "assumptions": {
            name: {"value": getattr(plan.assumed, name), "source": source} for name, source in plan.sources.items()
        },
    }
