"""Bad inputs of every wire and file; tests/test_bad_inputs.py reads each, and changes valid inputs at random."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import msgspec
from rollout_groups import rollout

from megatron_scalerl.batching import rollout_bytes
from megatron_scalerl.batching.assignment import SampleFacts, plan_step
from megatron_scalerl.checkpoints.commit import read_commit, write_commit
from megatron_scalerl.controller.ledger import Ledger
from megatron_scalerl.controller.run_folder import resume_point
from megatron_scalerl.engine.answers import completion
from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.evaluation.inputs import recipe_of_task
from megatron_scalerl.evaluation.problems import read_problems, split_schema
from megatron_scalerl.evaluation.results import Header, ResultFile
from megatron_scalerl.fit.table_file import read_tables
from megatron_scalerl.prompts.sources import read_rows
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.rewards.code_tests import parse_tests
from megatron_scalerl.rollouts.history import read_history
from megatron_scalerl.rollouts.store import GroupHeader, StoreWriter, block_bytes, read_block, segment_path
from megatron_scalerl.trainer import messages
from megatron_scalerl.trainer.batch_frames import Limits, checked
from megatron_scalerl.types import BlockRef, Prompt, Score
from megatron_scalerl.weights import plan as weight_plans

Case = tuple[str, str, Callable[[], object]]
"""(wire or file, what is wrong with it, what reads it)"""

WHERE = "engine-0: /generate"
RECIPE = "name: r\nsteps: 2\npolicy: {path: p}\nprompts: {path: q}\n"


def valid_answer() -> dict:
    """The response to a generation request of three tokens."""
    choice = {
        "token_ids": [5, 6, 7],
        "finish_reason": "stop",
        "logprobs": {"content": [{"logprob": -0.5}] * 3},
        "weight_versions": [{"version": "1", "start": 0, "end": 3}],
    }
    return {"choices": [choice]}


def answers() -> Iterator[Case]:
    """Responses of an engine over HTTP."""

    def case(what: str, **changes: object) -> Case:
        answer = valid_answer()
        answer["choices"][0] |= changes
        data = json.dumps(answer).encode()
        return "engine's response", what, lambda: completion(data, plan=None, seed=0, where=WHERE)

    whole = json.dumps(valid_answer()).encode()
    for what, data in {
        "half a response": whole[: len(whole) // 2],
        "nothing": b"",
        "another format": b"<html>busy</html>",
        "no completion": b'{"choices": []}',
        "two completions": json.dumps({"choices": valid_answer()["choices"] * 2}).encode(),
        "lists nested 100,000 deep": b"[" * 100_000,
        "bytes that are no UTF-8": b'{"choices": ["\xff"]}',
    }.items():
        yield (
            "engine's response",
            what,
            lambda data=data: completion(data, plan=None, seed=0, where=WHERE),
        )
    yield case("a negative token", token_ids=[5, -6, 7])
    yield case("a token of 33 bits", token_ids=[5, 2**33, 7])
    yield case("a token that is text", token_ids=[5, "6", 7])
    yield case("no tokens", token_ids=[], logprobs={"content": []}, weight_versions=[])
    yield case("an aborted completion", finish_reason="abort")
    yield case("fewer log-probs than tokens", logprobs={"content": [{"logprob": -0.5}] * 2})
    yield case("no log-probs", logprobs=None)
    yield case("a log-prob above 0", logprobs={"content": [{"logprob": 0.5}] * 3})
    yield case("vLLM's placeholder for a log-prob", logprobs={"content": [{"logprob": -9999.0}] * 3})
    yield case("no policy versions", weight_versions=None)
    yield case("a policy version that is text", weight_versions=[{"version": "latest", "start": 0, "end": 3}])
    yield case("a policy version of 400 digits", weight_versions=[{"version": "9" * 400, "start": 0, "end": 3}])
    yield case("policy versions with a gap", weight_versions=[{"version": "1", "start": 1, "end": 3}])
    yield case("policy versions beyond the end", weight_versions=[{"version": "1", "start": 0, "end": 10**12}])
    yield case("experts that are no array", routed_experts="AAAA")


def plans() -> Iterator[Case]:
    """Interruption plans in a request, as an engine reads them."""
    for what, plan in {
        "no budget": {"cut": 4, "phrase_ids": [9], "think_end_ids": [9], "answer_budget": 0, "eos_id": 2},
        "a phrase without the tag": {
            "cut": 4,
            "phrase_ids": [8],
            "think_end_ids": [9],
            "answer_budget": 4,
            "eos_id": 2,
        },
        "a cut that is text": {"cut": "4", "phrase_ids": [9], "think_end_ids": [9], "answer_budget": 4, "eos_id": 2},
        "no end": {"cut": 4, "phrase_ids": [9], "think_end_ids": [9], "answer_budget": 4},
    }.items():
        yield "interruption plan", what, lambda plan=plan: Plan.from_extra_args({"msrl_interruption": plan})


def wire() -> Iterator[Case]:
    """Messages between controller and trainer ranks."""
    done = messages.encode(messages.Done(call=1, rank=0, value=messages.msgspec.Raw(b"\xc0")))
    for what, frames in {
        "nothing": [b""],
        "two frames": [done, done],
        "half a message": [done[: len(done) // 2]],
        "text": [b"GET / HTTP/1.1\r\n"],
        "another type": [b"\x82\xa4type\xa4Evil\xa4rank\x00"],
        "lists nested 10,000 deep": [b"\x91" * 10_000],
    }.items():
        yield "rank's message", what, lambda frames=frames: messages.decode_for_controller(frames)
    data = rollout_bytes.write(rollout())
    fact = SampleFacts(prompt_token_ids=(1, 2), tokens=3, advantage=1.0, token_weight=1.0)
    plan = plan_step([fact], step=4, dp_size=1, micro_batch_tokens=64, policy_version=3).ranks[0]
    limits = Limits(micro_batch_tokens=64, experts=None)
    other = rollout_bytes.write(rollout(tokens=(5, 6, 7, 8)))
    later = rollout_bytes.write(rollout(versions=(9, 9, 9)))
    bare = replace(plan, micro_batches=((replace(fact, prompt_token_ids=()),),))
    long = replace(plan, micro_batches=((replace(fact, prompt_token_ids=(1,) * 90),),))
    for what, frames in {
        "a completion is missing": [*messages.batch_frames(plan, [data])][:1],
        "a completion too many": [*messages.batch_frames(plan, [data]), data],
        "a completion cut off": [messages.batch_frames(plan, [data])[0], data[:-1]],
        "a completion of another length": messages.batch_frames(plan, [other]),
        "a policy version of the future": messages.batch_frames(plan, [later]),
        "a micro-batch beyond its limit": messages.batch_frames(long, [data]),
        "no prompt": messages.batch_frames(bare, [data]),
    }.items():
        yield "batch on the wire", what, lambda frames=frames: checked(frames, limits)


def completions() -> Iterator[Case]:
    """A completion in bytes."""
    data = rollout_bytes.write(rollout())
    for what, found in {
        "nothing": b"",
        "cut off": data[:-1],
        "a byte too many": data + b"\0",
        "another format": b"\x07" + data[1:],
        "four billion tokens": data[:4] + struct.pack("<I", 2**32 - 1) + data[4 + 4 :],
        "random bytes": bytes(range(256)),
    }.items():
        yield "completion in bytes", what, lambda found=found: rollout_bytes.read(found)


def recipes(folder: Path) -> Iterator[Case]:
    """Recipe files."""
    for number, (what, text) in enumerate(
        {
            "nothing": "",
            "a list": "- 1\n",
            "no YAML": "name: [r\n",
            "an unknown key": RECIPE + "optimizer: {learning_rate: 1}\n",
            "an unknown section": RECIPE + "optimiser: {lr: 1}\n",
            "a number that is text": RECIPE.replace("steps: 2", "steps: many"),
            "a number out of range": RECIPE.replace("steps: 2", "steps: 0"),
            "a key that is missing": "name: r\nsteps: 2\nprompts: {path: q}\n",
            "more engines needed than there are": RECIPE + "engine: {count: 2, min_engines: 3}\n",
            "a group of one": RECIPE + "rollouts: {group_size: 1}\n",
            "an infinite number": RECIPE + "optimizer: {lr: 1.0e+999}\n",
            "a date in month 99": RECIPE + "seed: 2024-99-99\n",
            "an evaluation's task that is a list": RECIPE + "evaluation: {task: [math]}\n",
            "an evaluation's task that is a boolean": RECIPE + "evaluation: {task: no}\n",
        }.items()
    ):
        path = folder / f"recipe{number}.yaml"
        path.write_text(text)
        yield "recipe", what, lambda path=path: load_recipe(path)
    path = folder / "recipe.yaml"
    path.write_text(RECIPE)
    yield "recipe", "an override without a value", lambda: load_recipe(path, ["steps"])
    yield (
        "recipe",
        "an evaluation's task without tasks",
        lambda: recipe_of_task(load_recipe(path, ["evaluation.task=math"])),
    )
    tasks = folder / "tasks.yaml"
    each = "{path: q, held_out_path: h, weight: 0.5}"
    tasks.write_text(RECIPE.replace("{path: q}", f"{{tasks: {{math: {each}, code: {each}}}}}"))
    for what, override in {"another task": "evaluation.task=Math", "no task": "evaluation.task="}.items():
        yield (
            "recipe",
            f"an evaluation of {what}",
            lambda override=override: recipe_of_task(load_recipe(tasks, [override])),
        )
    yield "recipe", "no such file", lambda: load_recipe(folder / "none.yaml")


def prompts(folder: Path) -> Iterator[Case]:
    """Files of prompts."""
    for number, (what, data) in enumerate(
        {
            "no JSON": b'{"prompt": "a", "answer": "1"}\n{"prompt": \n',
            "a list": b"[1]\n",
            "a column that is missing": b'{"prompt": "a"}\n',
            "bytes that are no UTF-8": b'{"prompt": "\xff", "answer": "1"}\n',
        }.items()
    ):
        path = folder / f"prompts{number}.jsonl"
        path.write_bytes(data)
        yield "prompts", what, lambda path=path: [row.readable() for row in read_rows(path, ["prompt", "answer"])]
    parquet = folder / "prompts.parquet"
    parquet.write_bytes(b"PAR1 and no more")
    yield "prompts", "a torn Parquet file", lambda: list(read_rows(parquet, ["prompt", "answer"]))
    yield "prompts", "no such file", lambda: list(read_rows(folder / "none.jsonl", ["prompt", "answer"]))
    for what, text in {"no JSON and no Python": "assert f(1 ==", "no tests": "[]", "a number": "7"}.items():
        yield "unit tests", what, lambda text=text: parse_tests(text)


def checkpoints(folder: Path) -> Iterator[Case]:
    """Checkpoints of a run."""

    def checkpoint(name: str) -> Path:
        path = folder / name / "checkpoints" / "step_000002"
        path.mkdir(parents=True)
        (path / "controller.json").write_text('{"step": 2, "batches": 2}')
        (path / "shard.bin").write_bytes(bytes(100))
        write_commit(path, {"step": 2})
        return path

    yield "checkpoint", "no folder", lambda: read_commit(folder / "none")
    bad = {
        "no COMMIT": lambda p: (p / "COMMIT").unlink(),
        "a file that is missing": lambda p: (p / "shard.bin").unlink(),
        "a file cut off": lambda p: (p / "shard.bin").write_bytes(bytes(99)),
        "a file with another content": lambda p: (p / "shard.bin").write_bytes(b"\1" * 100),
        "COMMIT cut off": lambda p: (p / "COMMIT").write_text("{"),
        "COMMIT that is a list": lambda p: (p / "COMMIT").write_text("[]"),
        "COMMIT that names a file outside": lambda p: (p / "COMMIT").write_text('{"files": {"../x": 1}}'),
        "COMMIT nested 100,000 deep": lambda p: (p / "COMMIT").write_text("[" * 100_000),
        "COMMIT with a negative size": lambda p: (p / "COMMIT").write_text('{"files": {"x": -1}}'),
    }
    for number, (what, harm) in enumerate(bad.items()):
        path = checkpoint(f"run{number}")
        harm(path)
        yield "checkpoint", what, lambda path=path: read_commit(path)
    state = checkpoint("state")
    (state / "controller.json").write_text("[]")
    yield "controller.json", "a list", lambda: resume_point(folder / "state", lambda path: None)


def records(folder: Path) -> Iterator[Case]:
    """Journal, store, ledger."""
    admit = '{"event": "admit", "group_id": 0, "prompt_id": "p", "epoch": 0}\n'
    for number, (what, text) in enumerate(
        {
            "no JSON": admit + "garbage\n" + admit,
            "an event of another kind": '{"event": "evil"}\n' + admit,
            "a group without a number": '{"event": "admit", "prompt_id": "p", "epoch": 0}\n' + admit,
        }.items()
    ):
        run = folder / f"journal{number}"
        run.mkdir()
        (run / "journal.jsonl").write_text(text)
        yield "journal", what, lambda run=run: read_history(run)
    store = folder / "rollouts"
    store.mkdir()
    facts = rollout_bytes.facts_of(rollout_bytes.arrays_of(rollout()))
    header = GroupHeader(
        prompt=Prompt(prompt_id="p", text="", answer="", token_ids=(1, 2)),
        epoch=0,
        first_token_version=0,
        lost_completions=0,
        scores=(Score(correct=True, reward=1.0),),
        completions=(facts,),
    )
    with closing(StoreWriter(store)) as writer:
        reference = writer.append(block_bytes(0, header, [rollout_bytes.write(rollout())]))
    path = segment_path(store, reference.segment)
    data = path.read_bytes()
    far = BlockRef(segment=reference.segment, offset=10**9, nbytes=reference.nbytes)
    yield "rollout store", "a block beyond the end", lambda: read_block(path, far)
    for number, (what, found) in enumerate(
        {
            "a flipped bit in a token": data[:-3] + bytes([data[-3] ^ 1]) + data[-2:],
            "a block cut off": data[:-5],
            "zeros": bytes(len(data)),
        }.items()
    ):
        damaged = folder / f"damaged{number}" / path.name
        damaged.parent.mkdir()
        damaged.write_bytes(found)
        yield "rollout store", what, lambda damaged=damaged: read_block(damaged, reference)
    ledger = folder / "ledger.jsonl"
    ledger.write_text('{"unit": "gpu_hours"}\n')
    yield "ledger", "another unit", lambda: Ledger(ledger, "device_hours", incarnation="local.0")
    torn = folder / "torn.jsonl"
    torn.write_text('{"unit": "device_hours"}\n{"batch": \n{"batch": 1}\n')
    bare = folder / "bare.jsonl"
    bare.write_text('{"unit": "device_hours"}\n{"batch": 1, "step": 1, "role": "trainer"}\n')
    yield "ledger", "a charge without devices", lambda: Ledger(bare, "device_hours", incarnation="local.0")
    yield "ledger", "no JSON", lambda: Ledger(torn, "device_hours", incarnation="local.0")


def evaluations(folder: Path) -> Iterator[Case]:
    """Evaluation files, and results that are read again."""
    row = {"ID": "2024-I-1", "Problem": "Find $2+2$.", "Answer": 4}
    for number, (what, text) in enumerate(
        {
            "nothing": "",
            "columns of no known schema": '{"text": "2+2"}\n',
            "an AIME answer above 999": json.dumps(row | {"Answer": 1000}) + "\n",
            "an id twice": (json.dumps(row) + "\n") * 2,
            "no problem": json.dumps(row | {"Problem": ""}) + "\n",
            "a problem that is a list": json.dumps(row | {"Problem": ["2"]}) + "\n",
            "lists nested 100,000 deep": "[" * 100_000 + "\n",
            "an answer of 5,000 digits": json.dumps(row).replace("4}", "9" * 5000 + "}") + "\n",
            "an infinite answer": json.dumps(row).replace("4}", "1e999}") + "\n",
        }.items()
    ):
        path = folder / f"aime{number}.jsonl"
        path.write_text(text)
        schema = None if "schema" in what else "aime"
        yield "evaluation file", what, lambda path=path, schema=schema: read_problems(str(path), schema)
    yield "evaluation file", "an unknown schema", lambda: split_schema("aime.jsonl:amc")
    header = Header(policy="p", digest="d", version=0, files=(), seed=1, settings={"k": 2})
    for number, (what, text) in enumerate(
        {
            "of another seed": json.dumps({"header": msgspec.to_builtins(replace(header, seed=2))}) + "\n",
            "without a header": '{"key": 1}\n',
            "a row that is none": json.dumps({"header": msgspec.to_builtins(header)}) + '\n{"key": 1}\n',
            "a row nested 100,000 deep": f"{json.dumps({'header': msgspec.to_builtins(header)})}\n{'[' * 100_000}\n",
        }.items()
    ):
        out = folder / f"out{number}"
        out.mkdir()
        (out / "completions.jsonl").write_text(text)
        yield "evaluation's result", what, lambda out=out: ResultFile(out, header)


def tables(folder: Path) -> Iterator[Case]:
    """Points for the forecast, and the plan of a weight update."""
    for number, (what, suffix, text) in enumerate(
        [
            ("nothing", "csv", ""),
            ("a row that is too long", "csv", "gpu_hours,pass_rate\n1,0.2\n2,0.3,4\n"),
            ("no JSON", "jsonl", "{\n{}\n"),
            ("another suffix", "xlsx", "1"),
            ("lists nested 100,000 deep", "jsonl", "[" * 100_000 + "\n{}\n"),
            ("a list nested 100,000 deep", "json", "[" * 100_000),
            ("a number of 5,000 digits", "jsonl", '{"gpu_hours": ' + "9" * 5000 + "}\n{}\n"),
        ]
    ):
        path = folder / f"points{number}.{suffix}"
        path.write_text(text)
        yield "points to fit", what, lambda path=path: read_tables(path)
    for what, text in {
        "no JSON": "{",
        "a list of numbers": "[1]",
        "nothing": weight_plan([], []),
        "a negative size": weight_plan([("w", "float32", [-1])], []),
        "a type that cannot be sent": weight_plan([("w", "object", [1])], []),
        "a name twice": weight_plan([("w", "float32", [1]), ("w", "float32", [1])], []),
        "a part that is missing": weight_plan([("w", "float32", [4])], [[0, 0, 0, [[0, 3]]]]),
        "a part sent twice": weight_plan([("w", "float32", [4])], [[0, 0, 0, [[0, 4]]], [0, 0, 0, [[3, 4]]]]),
        "a part outside of its tensor": weight_plan([("w", "float32", [4])], [[0, 0, 0, [[0, 5]]]]),
        "a sender that is none": weight_plan([("w", "float32", [4])], [[0, 7, 0, [[0, 4]]]]),
    }.items():
        yield "weight plan", what, lambda text=text: weight_plans.from_json(text)


def weight_plan(parameters: list, parts: list) -> str:
    """A plan of one sender for one shard that needs everything, as JSON; parts: [tensor, sender, shard, ranges]."""
    named = [dict(zip(("name", "dtype", "shape"), each)) for each in parameters]
    needs = [[[[[0, size] for size in shape]] for _, _, shape in parameters]]
    return json.dumps({"parameters": named, "senders": 1, "needs": needs, "parts": parts})


def cases(folder: Path) -> list[Case]:
    """Every bad input; files are written to `folder`."""
    found = [*answers(), *plans(), *wire(), *completions()]
    for make in (recipes, prompts, checkpoints, records, evaluations, tables):
        sub = folder / make.__name__
        sub.mkdir()
        found += make(sub)
    return found


def error_of(case: Case) -> BaseException:
    """What reading the input raises."""
    source, what, read = case
    try:
        read()
    except Exception as error:  # the test says which types are right
        return error
    raise AssertionError(f"{source}, {what}: expected an error, found that it was read")
