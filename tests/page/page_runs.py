"""A small run with records, a store and a tokenizer, some of whose tokens are hostile to whoever shows them."""

import asyncio
from contextlib import asynccontextmanager

import aiohttp
import yaml
from journals import write_journal
from json_lines import append
from report_runs import write_run
from rollout_groups import group_of, rollout
from tokenizers import Tokenizer, decoders, models

from megatron_scalerl.algorithms import ScaleRL
from megatron_scalerl.controller.samples import samples_of
from megatron_scalerl.rollouts.history import BatchRecord
from megatron_scalerl.rollouts.token_scores import CompletionScores, write_scores
from megatron_scalerl.rollouts.trained import write_trained
from megatron_scalerl.types import Prompt, Score

HOSTILE = (
    "</script><script>window.broken = 1</script>",
    "<img src=x onerror='window.broken = 2'>",
    "\x1b]0;title\x07\x1b[2J",
    "\u202eright to left\u2066",
    "\u2028\u2029",
    "<!--",
)
WORDS = ("a", "b", " therefore", "=", "4", *HOSTILE, "x" * 1_000_000)
HOSTILE_IDS = tuple(range(5, 5 + len(HOSTILE)))
LONG_LINE = WORDS.index("x" * 1_000_000)


def save_hostile_tokenizer(folder):
    """A tokenizer.json whose tokens are WORDS."""
    folder.mkdir(parents=True)
    tokenizer = Tokenizer(models.WordLevel(vocab={word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


def step_record(step, **changes):
    """A row of metrics.jsonl with what the page draws."""
    return {
        "step": step,
        "batches": step,
        "batch/groups": 4.0,
        "batch/groups_kept": 3.0,
        "reward": step / 100,
        "train_pass_rate": 0.5,
        "train_pass_rate/sums": 0.25,
        "grad_norm": 0.5,
        "learning_rate": 1e-4,
        "entropy": 0.3,
        "mismatch_mean": 0.004,
        "truncated_share": 0.0,
        "interrupted_share": 0.1,
        "staleness_mean": 1.5,
        "staleness_max": 2.0,
        "generated_tokens_per_second": 900.0,
        "step_seconds": 2.0,
        "wait_for_batch_seconds": 0.5,
        "pinned_seconds": 0.25,
        "engine_paused_seconds": 0.1,
        "engine_idle_seconds": 0.0,
        "weight_pause_seconds": 0.1,
        "weight_update_seconds": 0.2,
        "weight_bytes": 2e9,
        "weight_whole_bytes": 2e9,
        **({"probe_mismatch_mean": 1e-7, "probe_mismatch_max": 2e-6 * step} if step % 2 == 0 else {}),
        **changes,
    }


def evaluation_record(step, **changes):
    """A row of evaluation.jsonl."""
    return {
        "step": step,
        "policy_version": step,
        "file": "aime24",
        "problems": 30,
        "k": 16,
        "mean_at_k": 0.25,
        "low": 0.125,
        "high": 0.375,
        "pass_at_k": {"1": 0.25, "16": 0.5},
        "weight_digest": "0123456789abcdef",
        **changes,
    }


def made_group(number, ids=((0, 2, 3, 4), (1, 3, 4)), *, prompt_ids=(0, 3)):
    """A group whose first completion is right and whose second is wrong and partly forced."""
    first, second = (rollout(tokens=tokens, logprobs=[-0.25] * len(tokens)) for tokens in ids)
    size = len(ids[1])
    second = rollout(
        tokens=ids[1],
        logprobs=[-2.0] + [0.0] * (size - 1),
        mask=[True] + [False] * (size - 1),
        versions=[0] + [1] * (size - 1),
    )
    scores = (Score(correct=True, reward=1.0), Score(correct=False, reward=-1.0, reason="no_answer"))
    prompt = Prompt(prompt_id=f"p{number}", text="", answer="</script>4\x1b", token_ids=prompt_ids)
    return group_of((first, second), scores, prompt=prompt, group_id=number), (first, second)


def _written(history, *, tokens, **changes):
    """A part that begins with a history of so many tokens."""
    sampled = len(tokens) - history
    mask = [False] * history + [True] * sampled
    return rollout(tokens=tokens, mask=mask, logprobs=[0.0] * history + [-0.5] * sampled, **changes)


def episode_group():
    """A group with an episode that forked into three parts, one of two turns that did not fork, and a single turn."""
    forked = (
        rollout(tokens=(0, 3)),
        _written(2, tokens=(7, 8, 1, 4), environment=((0, 2),)),
        _written(4, tokens=(5, 6, 7, 8, 2, 4), environment=((0, 4),), versions=(1,) * 6),
    )
    end = 2 + len(HOSTILE_IDS)
    mask = (True, False, *[False] * len(HOSTILE_IDS), True, True)
    versions = (0,) * end + (1, 1)
    whole = rollout(tokens=(0, 1, *HOSTILE_IDS, 2, 4), mask=mask, versions=versions, environment=((2, end),))
    made = (forked, whole, rollout(tokens=(1, 4)))
    scores = tuple(Score(correct=right, reward=1.0 if right else -1.0) for right in (True, False, False))
    prompt = Prompt(prompt_id="p6", text="", answer="4", token_ids=(0, 3))
    return group_of(made, scores, prompt=prompt, group_id=6), made


def write_decisions(folder, batch, groups):
    """What ScaleRL decides about a batch, as a run records it."""
    write_trained(folder, batch, samples_of(groups, ScaleRL()).trained)


def write_page_run(folder, *, validations=20, long_tokens=3):
    """The run: three steps with two groups each; group 1 is hostile, group 2 has a line of 1 MB.

    long_tokens: of the first completion of group 3, the last of which is ` therefore`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_run(folder, steps=validations, noise=0.01)
    save_hostile_tokenizer(folder / "policy")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe |= {"name": "</title><script>window.broken = 3</script>", "steps": 200}
    recipe["prompts"] = {"tasks": {"sums": {}}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe | {"policy": {"path": str(folder / "policy")}}))
    append(folder / "metrics.jsonl", *(step_record(n + 1) for n in range(3)))
    attempts = ({"run_id": "r", "incarnation": f"local.{n}", "unix_time": 1e9 + 900 * n} for n in range(2))
    append(folder / "attempts.jsonl", *attempts)
    fault = {"name": "engine-0", "state": "draining", "reason": "exit </script>", "unix_time": 1000000500.0}
    append(folder / "engines.jsonl", fault)
    groups = [made_group(number) for number in range(6)]
    groups[1] = made_group(1, (HOSTILE_IDS, HOSTILE_IDS), prompt_ids=HOSTILE_IDS)
    if long_tokens > 3:
        groups[3] = made_group(3, ((*[0] * (long_tokens - 1), 2), (1, 3, 4)))
    groups[2] = made_group(2, ((0, LONG_LINE, 4), (1, 3, 4)))
    batches = [BatchRecord(batch=n, step=n + 1, policy_version=n, group_ids=(2 * n, 2 * n + 1)) for n in range(3)]
    write_journal(folder, groups=groups, batches=batches)
    for record in batches:
        write_decisions(folder, record.batch, [groups[number][0] for number in record.group_ids])
    scores = CompletionScores(
        group_id=0, position=1, policy_version=0, logprobs=[-2.3, -1.0, -1.0], entropies=[0.7, 0.0, 0.0]
    )
    write_scores(folder, 1, [scores])
    return folder


def add_step(run, *groups, **options):
    """Groups from 6 on, and the fourth step, which has all of them. groups: numbers, or groups with their parts."""
    made = [made_group(group) if isinstance(group, int) else group for group in groups]
    batch = BatchRecord(batch=3, step=4, policy_version=3, group_ids=tuple(group.group_id for group, _ in made))
    write_journal(run, groups=made, batches=[batch], **options)
    return run


def write_plain_run(folder, *, steps=6, **recipe):
    """A run with `steps` validations after step 0; `recipe` is merged into its recipe."""
    folder.mkdir(parents=True)
    write_run(folder, steps=steps)
    stored = yaml.safe_load((folder / "recipe.yaml").read_text()) | {"name": folder.name, "steps": 100} | recipe
    (folder / "recipe.yaml").write_text(yaml.safe_dump(stored))
    return folder


TOKEN = {"token": "TOKEN"}


@asynccontextmanager
async def served(server):
    """A server and a session of requests to it."""
    async with server.serving(), aiohttp.ClientSession(f"http://127.0.0.1:{server.port}") as session:
        yield server, session


def answers(server, questions):
    """[(status, headers, text)] of requests (path, query, headers); TOKEN in a query is the token, PORT the port."""

    async def ask():
        found = []
        async with served(server) as (_, session):
            for path, query, *headers in questions:
                given = {k: server.token if v == "TOKEN" else v for k, v in query.items()}
                named = {k: v.replace("PORT", str(server.port)) for each in headers for k, v in each.items()}
                async with session.get(path, params=given, headers=named) as answer:
                    found.append((answer.status, answer.headers, await answer.text()))
        return found

    return asyncio.run(asyncio.wait_for(ask(), 240))
