"""Each of the engine's checks detects its faults."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from aiohttp import web

from megatron_scalerl.check_gpu import tiny_task
from megatron_scalerl.check_gpu.engine import checks, reference, update
from megatron_scalerl.check_gpu.engine.decode_rate import check_decode_rate, rates, within_range
from megatron_scalerl.check_gpu.engine.reference import Reference, write_dense
from megatron_scalerl.check_gpu.engine.routed_experts import check_routed_experts, choice_faults
from megatron_scalerl.check_gpu.engine.scene import engine_options, make_scene
from megatron_scalerl.check_gpu.findings import Recorder, read_findings
from megatron_scalerl.check_gpu.part import Deadline, PartSetting, limited
from megatron_scalerl.check_gpu.parts import engine, loop
from megatron_scalerl.check_gpu.programs import cause, serving_facts
from megatron_scalerl.check_gpu.table import part_named
from megatron_scalerl.engine.client import SECRET_HEADER, EngineClient
from megatron_scalerl.plan.counting import Parameters
from megatron_scalerl.recipe.process_sections import EngineSection
from megatron_scalerl.types import ExpertChoices, Rollout
from megatron_scalerl.weights.plan import SendReport, all_of, manifest_of, needs_to_json, whole

ROLLOUT = Rollout(
    token_ids=(7, 8, 9, 20, 5, 11, 12),
    rollout_logprobs=(-1.0, -1.0, -1.0, 0.0, 0.0, -1.0, -1.0),
    policy_versions=(0,) * 7,
    loss_mask=(True, True, True, False, False, True, True),
    interrupted=True,
    truncated=True,
    thinking_cut=3,
    seed=0,
)


def setting(folder, **changes):
    module = part_named("engine").module
    values = dict(part="engine", module=module, on_gpu=False, size="toy", layers=None, limit_s=100.0, gpus=0)
    return PartSetting(**values | changes, folder=str(folder), findings=str(folder / "findings.jsonl"))


@pytest.fixture
def scene(tmp_path):
    return make_scene(setting(tmp_path), start_s=10)


def test_every_declared_check_is_reported_by_one_branch():
    assert sorted(part_named("engine").checks) == sorted(["start", *engine.ALONE, *engine.WITH_TRAINER, *engine.LAST])


async def statuses(handler):
    """What a stand-in for the engine answers to the requests of the check."""
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    client = EngineClient(url=f"http://127.0.0.1:{port}", secret="abc", name="stand-in", settings=EngineSection())
    try:
        return await checks.refused(client)
    finally:
        await client.close()
        await runner.cleanup()


@pytest.mark.parametrize(("leak", "found"), [("none", None), ("/pause", "POST /pause"), ("wrong", "(wrong secret)")])
def test_an_engine_that_answers_without_the_secret_is_detected(leak, found):
    async def stand_in(request):
        given = request.headers.getall(SECRET_HEADER, [])
        free = request.path in ("/health", leak) or given == ["abc"] or (leak == "wrong" and len(given) == 1)
        return web.Response(status=200 if free else 401)

    wrong = checks.open_paths(asyncio.run(statuses(stand_in)))
    assert (wrong == []) if found is None else any(found in line for line in wrong)


@pytest.mark.parametrize(("dtype", "faulty"), [(torch.float32, False), (torch.bfloat16, True)])
def test_logits_rounded_to_bfloat16_are_detected(dtype, faulty):
    generator = torch.Generator().manual_seed(0)
    hidden, head = torch.randn(64, 256, generator=generator), torch.randn(512, 256, generator=generator) * 0.2
    logits = (hidden @ head.T).to(dtype).float()
    rows = logits.log_softmax(-1).topk(5).values.tolist()
    assert bool(checks.head_faults("float32", rows)) == faulty
    assert "found bfloat16" in checks.head_faults("bfloat16", rows)[0]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"interrupted": False}, "expected interrupted True"),
        ({"token_ids": (7, 8, 9, 11, 20, 5, 12)}, "expected the phrase (20, 5) there"),
        ({"loss_mask": (True,) * 7}, "another mask"),
        ({"policy_versions": (0,) * 6 + (1,)}, "expected policy version 0"),
        ({"token_ids": (7, 2, 9, 20, 5, 11, 12)}, "expected interrupted False"),
        ({"token_ids": (7, 5, 9, 20, 5, 11, 12)}, "expected interrupted False"),
    ],
)
def test_an_interruption_at_another_position_is_detected(changes, fault):
    found = checks.interruption_faults(
        replace(ROLLOUT, **changes), phrase=(20, 5), think_end=(5,), ends=(2,), version=0, answer_tokens=2
    )
    assert (found == []) if fault is None else fault in found[0]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({}, None),
        ({"later": 4}, "expected no tokens while paused, found 1"),
        ({"reported": False}, "/is_paused"),
        ({"before": 7, "later": 7}, "expected a pause before token 7"),
        ({"whole": 9}, "expected 9 tokens after the pause, found 7"),
    ],
)
def test_a_pause_that_does_not_pause_is_detected(changes, fault):
    values = dict(before=3, later=3, whole=7, reported=True, rollout=ROLLOUT)
    found = checks.pause_faults(checks.Paused(**values | changes))
    assert (found == []) if fault is None else fault in found[0]


def test_the_bound_of_bfloat16_is_its_own_rounding_and_a_wrong_policy_exceeds_it(tmp_path):
    generator = torch.Generator().manual_seed(0)
    ids = tuple(torch.randint(6, 512, (60,), generator=generator).tolist())
    rollout = replace(ROLLOUT, token_ids=ids, loss_mask=(True,) * 60)
    policy = Reference(write_dense(tmp_path / "a", seed=0, dtype="bfloat16", toy=True))
    other = Reference(write_dense(tmp_path / "b", seed=1, dtype="bfloat16", toy=True))
    bound = reference.bound_for("bfloat16", policy, [(1, 7)], [rollout])
    exact = policy.logprobs((1, 7), ids)
    assert bound.statistic == "mean" and 0.005 < bound.nats < 0.2
    assert reference.gap(exact, policy.rounded((1, 7), ids)).mean < bound.nats
    assert reference.gap(exact, other.logprobs((1, 7), ids)).mean > 10 * bound.nats
    assert reference.bound_for("float32", policy, [], []).nats == reference.EXACT
    assert policy._rounded.model.rotary_emb.inv_freq.dtype == torch.float32


@pytest.mark.parametrize(
    ("largest", "status"), [(0.01, "passed"), (0.2, "failed"), (0.6, "failed"), (float("nan"), "failed")]
)
def test_a_distance_is_judged_by_its_mean_and_its_largest(largest, status, tmp_path):
    found = reference.gap([0.0, 0.0], [0.0, largest])
    record = Recorder("engine", tmp_path / "findings")
    bound = reference.Bound(statistic="mean", nats=0.05, why="")
    reference.record_gap(record, "trainer parity", found, bound, "", "bfloat16")
    assert [f.status for f in read_findings(tmp_path / "findings")] == [status]


MANIFEST = manifest_of([("w", "float32", (1,))])


class StandInEngine:
    """An engine that says after an update that it holds bytes of another digest."""

    name = "engine-0"

    produced_tokens = received_tokens = 0

    def __init__(self):
        self.version, self.tokens = 0, 0

    def abort(self, reason):
        """No request notices it."""

    async def score(self, ids):
        return tuple(-1.0 - self.version for _ in ids[1:])

    async def progress(self):
        self.tokens += 50
        return SimpleNamespace(tokens=self.tokens)

    async def generate(self, prompt, *, sampling):
        await asyncio.sleep(0)
        return ROLLOUT

    async def info(self):
        return SimpleNamespace(world_size=1, weight_version="1", weight_digests=("other",))

    async def post(self, path, body=None):
        self.version = 1

    async def rpc(self, method, *arguments):
        return [needs_to_json(all_of(MANIFEST))] if method == "msrl_weight_needs" else [None]

    async def pause(self, *, clear_cache):
        pass

    async def resume(self):
        pass


class StandInTrainer:
    """A trainer whose update has the digest "sent"."""

    rendezvous, info = None, None

    async def manifest(self):
        return MANIFEST

    async def plan_weights(self, needs):
        return whole(MANIFEST)

    async def connect_weights(self, connection):
        pass

    async def send_weights(self, version):
        return SendReport(
            digests=("sent",), values=("sent",), bytes=1, whole_bytes=1, most_sent=1, most_received=1, seconds=0.0
        )


def test_an_update_with_another_digest_fails_and_what_needs_it_is_not_run(scene, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.controller.weight_sync.Connection", lambda **_: {})
    record = Recorder("engine", tmp_path / "findings")
    serving = SimpleNamespace(process=SimpleNamespace(client=StandInEngine()), log=tmp_path / "log")
    training = SimpleNamespace(client=StandInTrainer())
    asyncio.run(update.check_update(scene, record, serving, None, training))
    found = {f.check: f for f in read_findings(tmp_path / "findings")}
    assert {check: f.status for check, f in found.items()} == {
        "engine/update": "failed",
        "engine/trainer parity": "not run",
        "engine/probe": "not run",
    }
    assert (
        "verify: expected version, digests ('1', ('sent',)), found ('1', ('other',))" in found["engine/update"].detail
    )


def test_an_engine_that_does_not_start_is_one_line_and_the_rest_is_not_run(scene, tmp_path, monkeypatch):
    """On a GPU a second attention backend is tried; the first failure is the one that is told."""
    asked = []

    async def fails(recipe, log):
        asked.append(recipe.engine.vllm.get("attention_backend"))
        raise RuntimeError(f"engine-0 exited with code 1 before it was up: ValueError: no kernel {len(asked)}")

    async def idle():
        await asyncio.sleep(60)

    monkeypatch.setattr(engine, "serve", fails)
    monkeypatch.setattr(engine, "_training", lambda *_: SimpleNamespace(start=idle, stop=lambda: asyncio.sleep(0)))
    on_gpu = replace(scene, setting=replace(scene.setting, on_gpu=True))
    asyncio.run(engine._run(on_gpu, Recorder("engine", tmp_path / "findings"), Deadline(100)))
    found = {f.check.removeprefix("engine/"): f for f in read_findings(tmp_path / "findings")}
    assert asked == [None, "TRITON_ATTN"]
    assert found.keys() == set(part_named("engine").checks)
    assert found["start"].status == "failed" and found["start"].detail.endswith("ValueError: no kernel 1")
    assert {f.status for name, f in found.items() if name != "start"} == {"not run"}


def test_a_backend_that_starts_where_vllms_choice_does_not_serves_the_rest(scene, tmp_path, monkeypatch):
    async def serve(recipe, log):
        if "attention_backend" not in recipe.engine.vllm:
            raise RuntimeError("RuntimeError: nvcc was not found")
        return SimpleNamespace(facts={})

    monkeypatch.setattr(engine, "serve", serve)
    on_gpu = replace(scene, setting=replace(scene.setting, on_gpu=True))
    record = Recorder("engine", tmp_path / "findings")
    assert asyncio.run(engine._started(on_gpu, record, Deadline(100))) is not None
    [start] = read_findings(tmp_path / "findings")
    assert start.status == "failed"
    assert start.detail == "RuntimeError: nvcc was not found (it starts with attention_backend=TRITON_ATTN)"
    assert engine_options(on_gpu.setting)["attention_backend"] == "TRITON_ATTN"
    assert "engine.vllm.attention_backend=TRITON_ATTN" in tiny_task.overrides(
        on_gpu.setting, tmp_path, loop.RUNS[0], policy=tmp_path, warm=True
    )


@pytest.mark.parametrize(("seconds", "what"), [(0.05, "expected an end within 0 s"), (9, "connection lost")])
def test_an_engine_that_hangs_or_dies_fails_one_check_with_its_logs_error(seconds, what, tmp_path):
    (tmp_path / "engine.log").write_text("RuntimeError: illegal memory access\nRequest x aborted.\n")

    async def scenario():
        async with limited(Recorder("engine", tmp_path / "findings"), "pause", seconds, tmp_path / "engine.log"):
            await asyncio.sleep(0.2)
            raise RuntimeError("connection lost")

    asyncio.run(scenario())
    [found] = read_findings(tmp_path / "findings")
    assert found.status == "failed" and what in found.detail
    assert found.detail.endswith("engine.log: RuntimeError: illegal memory access")


OUR_FORMAT = "(EngineCore pid=77) 2026-11-20 12:00:00,123 {:<7} engine-0 vllm.v1.core: "
VLLMS_FORMAT = "(EngineCore pid=77) {} 11-20 12:00:00 [core.py:9] "


@pytest.mark.parametrize("at", [OUR_FORMAT, VLLMS_FORMAT])
def test_the_cause_and_the_kernels_are_read_from_vllms_log(at):
    lines = [
        at.format("INFO") + "Initializing a V1 LLM engine (v0.32.0) with config: x, enforce_eager=False, y",
        at.format("INFO") + "Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN'].",
        at.format("INFO") + "Graph capturing finished in 3 secs, took 0.25 GiB",
    ]
    assert serving_facts("\n".join(lines)) == {
        "attention_backend": "FLASH_ATTN",
        "cuda_graphs": "captured in 3 s, 0.25 GiB",
    }
    assert serving_facts("enforce_eager=True")["cuda_graphs"] == "off (eager)"
    told = at.format("INFO") + "Using AttentionBackendEnum.TRITON_ATTN backend."
    assert serving_facts("Using auto backend for x\n" + told)["attention_backend"] == "TRITON_ATTN"
    failed = [
        at.format("ERROR") + "Traceback (most recent call last):",
        at.format("ERROR") + "RuntimeError: nvcc was not found",
        "RuntimeError: Engine core initialization failed. See root cause above.",
        "  trailing words",
    ]
    assert cause("\n".join(failed)) == "RuntimeError: nvcc was not found"
    assert cause("a line\n\n") == "a line" and cause("") == "empty log"


def test_experts_of_another_shape_are_found(scene):
    prompts = scene.prompts[:1]
    tokens = len(prompts[0].token_ids) + len(ROLLOUT.token_ids) - 1

    def rollout(tokens, value):
        data = np.arange(tokens * 8) % value
        choices = ExpertChoices(layers=4, topk=2, width=1, data=data.astype(np.uint8).tobytes())
        return replace(ROLLOUT, expert_choices=choices)

    def faults(found):
        return choice_faults(prompts, [found], layers=4, topk=2, experts=8)

    assert faults(rollout(tokens, 8)) == []
    assert "found none" in faults(ROLLOUT)[0]
    assert "numbers of [*, 4, 2]" in faults(rollout(tokens - 1, 8))[0]
    assert "below 8" in faults(rollout(tokens, 9))[0] and "several" in faults(rollout(tokens, 1))[0]


@pytest.mark.parametrize("check", [check_decode_rate, check_routed_experts])
def test_an_engine_that_could_not_finish_is_not_started(check, scene, tmp_path, monkeypatch):
    """A start of 60 s does not fit into what is left of 70 s."""
    monkeypatch.setattr("megatron_scalerl.check_gpu.part.time", SimpleNamespace(monotonic=lambda: 0.0))
    on_gpu = replace(scene, setting=replace(scene.setting, on_gpu=True))
    arguments = [on_gpu, Recorder("engine", tmp_path / "findings"), Deadline(70)]
    rendezvous = [None] if check is check_routed_experts else []
    asyncio.run(check(*arguments, *rendezvous, start_s=60.0))
    [found] = read_findings(tmp_path / "findings")
    assert found.status == "not run" and "an engine started in 60 s), found 62 s left" in found.detail


def test_a_trainer_that_never_answers_ends_at_a_limit_of_its_own(scene, tmp_path, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.check_gpu.part.TOY_CHECK_S", 0.05)
    training = SimpleNamespace(log=tmp_path / "trainer.log")
    training.log.write_text("RuntimeError: no NCCL\nwaiting\n")
    record = Recorder("engine", tmp_path / "findings")

    async def scenario():
        stuck = asyncio.create_task(asyncio.sleep(600))
        await engine._with_trainer(scene, record, None, None, training, stuck, Deadline(100))

    asyncio.run(asyncio.wait_for(scenario(), 60))
    found = {f.check.removeprefix("engine/"): f for f in read_findings(tmp_path / "findings")}
    assert {name: f.status for name, f in found.items()} == {
        "trainer parity": "failed",
        "update": "not run",
        "probe": "not run",
    }
    assert found["trainer parity"].detail.endswith("found none; trainer.log: RuntimeError: no NCCL")


def test_a_second_call_does_not_read_the_logs_of_the_first(tmp_path):
    for name in ("engine-0", "trainer"):
        (tmp_path / "engine" / f"{name}.log").parent.mkdir(exist_ok=True)
        (tmp_path / "engine" / f"{name}.log").write_text("RuntimeError: of the first call\n")
    make_scene(setting(tmp_path), start_s=10)
    assert not list((tmp_path / "engine").glob("*.log"))


def test_rates_out_of_range_are_omitted(tmp_path):
    found = {"gpu": "h200", "engine_step_ms": 2.0, "hbm_efficiency": 1.2, "engine_overhead_gib": -0.5}
    data, omitted = within_range(found)
    assert data == {"gpu": "h200", "engine_step_ms": 2.0}
    assert omitted == [
        "engine_overhead_gib: expected a number of at least 0, found -0.5",
        "hbm_efficiency: expected a number above 0 and at most 1, found 1.2",
    ]


def test_rates_invert_the_planners_model_of_a_step():
    parameters = Parameters(total=10**9, active=10**9, experts=0, embedding=10**8, head=10**8, passthrough=0)
    weights = 2 * 9 * 10**8 / 3.35e12 / 0.5
    found = rates(
        {1: 2e-3, 64: 3e-3},
        {1: 2e-3 + weights, 64: 9e-3},
        parameters,
        gpu="h100-80g",
        freed_bytes=2 * 10**9 + 6 * 2**30,
    )
    assert found["engine_step_ms"] == pytest.approx(2.0) and found["hbm_efficiency"] == pytest.approx(0.5)
    assert found["engine_overhead_gib"] == pytest.approx(2.0)
    unknown = rates({1: 1.0, 64: 1.0}, {1: 2.0, 64: 2.0}, parameters, gpu=None, freed_bytes=None)
    assert json.dumps(found) and not {"hbm_efficiency", "engine_overhead_gib"} & unknown.keys()
