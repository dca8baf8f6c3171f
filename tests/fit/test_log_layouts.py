"""What is read of the logs of other trainers: two small files of each, rebuilt by hand in the layout of today."""

import json
from typing import NamedTuple

import pytest
from other_tools import write

from megatron_scalerl.fit.inputs import read_curves

STEPS = range(1, 13)
RAY = "\x1b[36m(TaskRunner pid=4217, ip=10.0.0.7)\x1b[0m "
VERL_CONFIG = (
    "{'actor_rollout_ref': {'actor': {'ppo_epochs': 1, 'clip_ratio': 0.2}},\n 'trainer': {'total_epochs': 15}}\n"
)


def rate(step):
    """The pass rate of a validation."""
    return round(0.2 + 0.04 * step, 3)


def score(step):
    """The score of a batch of training."""
    return round(0.9 - 0.01 * step, 3)


class Case(NamedTuple):
    """A file, and what is read in it or the end of the one line that refuses it."""

    name: str
    text: str
    column: str = ""
    axis: str = "step"
    computes: tuple[float, ...] = tuple(STEPS)
    rates: tuple[float, ...] = tuple(map(score, STEPS))
    initial: float | None = None
    says: tuple[str, ...] = ()
    refused: str = ""


def validated(every, **more):
    """Fields of a case whose validation is at each `every`th step and at step 0."""
    steps = tuple(step for step in STEPS if step % every == 0)
    return {"computes": steps, "rates": tuple(map(rate, steps)), "initial": rate(0), **more}


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def verl(step, every=None, prefix="", **metrics):
    """A line of verl's console, with timings and lengths whose names begin with those of scores."""
    names = {
        "actor/entropy": 0.31,
        "critic/score/mean": score(step),
        "critic/score/max": 1.0,
        "critic/rewards/mean": score(step) - 0.01,
        "critic/advantages/mean": -0.02,
        "response_length/mean": 512.0,
        "response_length/clip_ratio": 0.01,
        "timing_s/reward": 0.41,
        "timing_per_token_ms/gen": 0.02,
        "perf/mfu/actor": 0.35,
        "training/global_step": step,
    } | metrics
    if step == 0:
        names = {}
    if every and step % every == 0:
        names |= {
            "val-aux/openai/gsm8k/reward/mean@4": f"np.float64({rate(step) + 0.2})",
            "val-core/openai/gsm8k/acc/mean@4": f"np.float64({rate(step)})",
            "val-core/openai/gsm8k/acc/best@4/mean": 0.95,
        }
    return f"{prefix}step:{step} - " + " - ".join(f"{name}:{value}" for name, value in names.items()) + "\n"


def verl_rows(every):
    for step in (0, *STEPS):
        data = {"critic/score/mean": score(step), "timing_s/testing": 9.5} if step else {}
        if step % every == 0:
            data |= {"val-core/math/acc/mean@1": rate(step), "val-aux/num_turns/mean": 2.0}
        yield {"step": step, "data": data}


def slime(step, sets=("aime",), passrate=False):
    """slime's lines of one rollout: performance, rewards and, at every third one, evaluations."""
    perf = {"rollout/response_len/mean": 512.0, "rollout/truncated_ratio": 0.1, "perf/rollout_time": 31.0}
    rollout = {"rollout/raw_reward": score(step), "rollout/rewards": 0.0, "rollout/response_lengths": 512.0}
    text = f"rollout_metrics.py:268 - perf {step}: {perf}\ntrain_metric_utils.py:135 - rollout {step}: {rollout}\n"
    if passrate:
        text += f"metrics.py:1 - passrate {step}: {{'passrate/pass@1': {score(step)}, 'passrate/pass@8': 0.97}}\n"
    if step % 3 == 0:
        names = {f"eval/{name}": rate(step) for name in sets}
        names |= {f"eval/{name}/response_len/mean": 700.0 for name in sets}
        names |= {f"eval/{name}/repetition_frac": 0.01 for name in sets}
        names |= {f"eval/{name}-truncated_ratio": 0.02 for name in sets}
        text += f"(RolloutManager pid=88) rollout_metrics.py:247 - eval {step}: {names}\n"
    return text


def prime(step, validation=True):
    text = f"10:00:01 SUCCESS Step {step} |   12.3s | Reward {score(step)} | Trainable 100/128 (78.1%) | "
    text += "Turns 1.0 | Branches 1.0 | Max Off-Policy 2 | Error 0.0% | Cancelled 1.5% | Truncation 3.1%\n"
    text += "\t\t ╰─ gsm8k | Ratio 50.0% | Reward 0.1000 | Turns 1.0 | Error 0.0%\n"
    if validation and step % 3 == 0:
        text += f"10:00:09 SUCCESS Evaluated math500 (Step {step}) | Policy v{step} |    8.1s | "
        text += f"Reward {rate(step)} | Turns 1.0 | Branches 1.0 | Error 0.0% | Truncation 0.4%\n"
    return text


def sky(step, prefix="", **metrics):
    """SkyRL's console logger: a heading, and below it the metrics as pprint prints them."""
    names = {f"'{name}'": f"'{value:.4f}'" for name, value in sorted(metrics.items())}
    body = ",\n ".join(f"{name}: {value}" for name, value in names.items())
    text = f"2026-08-21 INFO tracking.py:189 - Step {step}: \n{{{body}}}\n"
    return "".join(prefix + line + "\n" for line in text.splitlines())


def sky_training(step):
    return {
        "generate/avg_num_tokens": 512.0,
        "generate/avg_tokens_non_zero_rewards": 480.0,
        "reward/avg_pass_at_8": 0.95,
        "reward/avg_raw_reward": score(step),
        "reward/mean_positive_reward": score(step) + 0.02,
        "reward_dropped/avg_raw_reward": 0.5,
        "timing/step": 31.0,
        "trainer/epoch": 0,
        "trainer/global_step": step,
    }


def nemo(step, every=None, dynamic=False):
    """NeMo-RL's print of a step; a validation comes before the results of training."""
    heading = f"\n{'=' * 25} Step {step}/500 {'=' * 25}\n▶ Preparing batch...\n"
    if step == 0:
        heading = "\n🔍 Running initial validation...\n"
    text = heading
    if every and step % every == 0:
        text += (
            f"\n📊 Validation Results:\n    • Accuracy: {rate(step)}\n    • Average response length: 512.0 tokens\n"
        )
        text += "    • Samples processed: 256\n\n  ⏱️  Validation Timing:\n    • Total validation time: 9.15s\n"
    if step:
        reward = f"  • Avg Reward: {score(step)}\n"
        if dynamic:
            reward = f"  • Avg Filtered Reward: 0.5000\n  • Avg Total Reward: {score(step)}\n"
        text += f"\n📊 Training Results:\n  • Loss: 0.0123\n  • Generation KL Error: 0.0010\n{reward}"
        text += "  • Mean Generation Length: 512.0000\n\n⏱️  Timing:\n  • Total step time: 35.12s\n"
    return text


def trl(step, every=None):
    row = {
        "loss": "0.0",
        "grad_norm": "nan" if step == 3 else "0.2",
        "learning_rate": "1e-06",
        "num_tokens": f"{1000.0 * step}",
        "completions/mean_length": "212.5",
        "rewards/accuracy_reward/mean": f"{score(step)}",
        "rewards/format_reward/mean": "0.99",
        "reward": f"{score(step) + 1:.3f}",
        "reward_std": "0.31",
        "frac_reward_zero_std": "0.25",
        "epoch": f"{step / 100}",
    }
    text = f" {step}%|█▏ | {step}/100 [00:31<51:00, 31.0s/it]\n{row}\n"
    if every and step % every == 0:
        row = {"eval_loss": float("-inf"), "eval_runtime": 9.5, "eval_accuracy": rate(step), "epoch": step / 100}
        text += f"{row}\n"
    return text


def openrlhf(step, asynchronous=False):
    """OpenRLHF's lines of one step, with an evaluation at every third one."""
    row = {"policy_loss": -0.01, "actor_lr": 5e-07, "reward": score(step), "return": score(step) - 0.1}
    row |= {"response_length": 512.0, "timing/generation": 12.5, "timing/step_total": 35.0}
    names = {"eval_math_pass4": 0.9, "eval_math_pass1": rate(step), "eval_math_response_length_mean": 700.0}
    names |= {"eval_math_truncated_rate": 0.01, "eval_num_samples": 2000.0}
    if asynchronous:
        row["dynamic_filtering_pass_rate"] = 0.71
        return f"(PPOTrainer pid=7) 2026 [INFO] Global step {step}: {row}\n"
    text = f"2026 [INFO] ✨ Global step {step}: {row}\n"
    if step % 3 == 0:
        text += f"✨ Evaluation completed in 0:00:31, global_step {step}, eval_metrics: {names}\n"
    return text


def tinker(step):
    """tinker-cookbook's table of one step."""
    names = {"env/all/correct": score(step), "env/all/format": 0.99, "env/all/reward/total": 0.71}
    names |= {"by_group/frac_all_good": 0.2, "optim/entropy": 0.3, "time/total": 31.5}
    if step % 3 == 0:
        names["test/env/all/correct"] = rate(step)
    cells = "".join(f"│ {name:<24} │ {value:.6f} │\n" for name, value in names.items())
    header = f"          Step {step}          \n┏━━━━┳━━━━┓\n┃ Metric ┃ Value ┃\n┡━━━━╇━━━━┩\n"
    return f"ml_log.py:1\n{header}{cells}└────┴────┘\n"


def areal(step, every=None):
    """AReaL's table of one step: two metrics a row."""
    cells = [("ppo_actor/task_reward/avg", score(step)), ("ppo_actor/seq_len/avg", 512.0)]
    cells += [("ppo_actor/correct_n_seqs", 100.0), ("ppo_actor/no_eos_ratios/avg", 0.01)]
    cells += [("timeperf/rollout", 31.5), ("rollout/reward", score(step) - 0.1)]
    if every and step % every == 0:
        cells += [("eval-rollout/reward", rate(step)), ("timeperf/eval", 9.5)]
    pairs = zip(cells[::2], cells[1::2])
    table = "\n├──┼──┤\n".join(f"│ {a:<28} │ {x:.4e} │ {b:<28} │ {y:.4e} │" for (a, x), (b, y) in pairs)
    head = f"20260521-10:00:00.123 StatsLogger INFO: Epoch 1/9 Step {step}/400 Train step {step}/3600 done.\n"
    return f"{head}StatsLogger INFO: Stats (1/1):\nStatsLogger INFO: \n╒══╤══╕\n{table}\n╘══╧══╛\n"


def every_step(line, first=1, **options):
    return "".join(line(step, **options) for step in range(first, STEPS[-1] + 1))


def chart():
    header = '"Step","grpo - eval/math/avg@8","grpo - eval/math/avg@8__MIN","grpo - eval/math/avg@8__MAX"'
    return "\n".join([header, *(f'"{step}","{rate(step)}","{rate(step)}","{rate(step)}"' for step in (0, *STEPS))])


def history():
    """W&B's history of prime-rl, without an evaluation."""
    names = "_step,step,train/agg/all/num_turns/mean,train/agg/all/solver/reward/mean,train/agg/all/solver/solved_all"
    rows = [f"{2 * step},{step},1.0,{score(step)},0.31" for step in STEPS]
    return "\n".join([names, *rows])


CASES = {
    "verl, GRPO": Case(
        "train.log",
        RAY + VERL_CONFIG + every_step(verl, first=0, every=3, prefix=RAY),
        "val-core/openai/gsm8k/acc/mean@4",
        **validated(3, says=("best@4/mean, val-aux/openai/gsm8k/reward/mean@4 and 2 more (--score)",)),
    ),
    "verl, PPO without a validation": Case(
        "train.log",
        "INFO config.py:542] This model supports multiple tasks: {'embed', 'generate'}. Defaulting to 'generate'.\n"
        + every_step(verl, **{"critic/values/mean": 0.5, "critic/vf_explained_var": 0.8, "critic/returns/mean": 0.2}),
        "critic/score/mean",
        says=("a score of training",),
    ),
    "verl, file": Case("grpo.jsonl", lines(verl_rows(every=2)), "val-core/math/acc/mean@1", **validated(2)),
    "verl, file with one validation": Case(
        "grpo.jsonl",
        lines(verl_rows(every=12)),
        "critic/score/mean",
        says=("columns with fewer than 3 rows: val-core/math/acc/mean@1",),
    ),
    "slime": Case("train.log", every_step(slime, first=0), "eval/aime", **validated(3)),
    "slime, two evaluations": Case(
        "train.log",
        every_step(slime, first=1, sets=("aime", "gsm8k"), passrate=True),
        "passrate/pass@1",
        says=("validation columns without a measure: eval/aime, eval/gsm8k (--score)",),
    ),
    "prime-rl": Case("orchestrator.log", every_step(prime, first=0), "eval/math500/Reward", **validated(3)),
    "prime-rl without an evaluation": Case("orchestrator.log", every_step(prime, validation=False), "Reward"),
    "prime-rl, the trainer's process": Case(
        "trainer.log",
        "".join(f"SUCCESS Step {s} |   9.1s | Loss 0.0012 | Entropy 0.31 | MFU 35.1%\n" for s in STEPS),
        refused="(name it with --score)",
    ),
    "SkyRL": Case(
        "train.log",
        "{'trainer': {'eval_interval': 3, 'epochs': 20},\n 'generator': {'max_reward': 1.0}}\n"
        + sky(0, **{"eval/all/avg_score": rate(0), "eval/all/pass_at_4": 0.9})
        + every_step(lambda s: sky(s, **sky_training(s) | ({"eval/all/avg_score": rate(s)} if s % 3 == 0 else {}))),
        "eval/all/avg_score",
        **validated(3),
    ),
    "SkyRL without an evaluation": Case(
        "train.log",
        every_step(lambda s: sky(s, prefix="(skyrl_entrypoint pid=31) ", **sky_training(s))),
        "reward/avg_raw_reward",
    ),
    "NeMo-RL": Case("train.log", every_step(nemo, first=0, every=3), "Accuracy", **validated(3)),
    "NeMo-RL without a validation": Case("train.log", every_step(nemo, dynamic=True), "Avg Total Reward"),
    "TRL": Case(
        "train.log",
        every_step(trl, every=3),
        "eval_accuracy",
        **validated(3, axis="epoch", computes=(0.03, 0.06, 0.09, 0.12), initial=None),
    ),
    "TRL without an evaluation": Case(
        "train.log",
        every_step(trl),
        "rewards/accuracy_reward/mean",
        axis="num_tokens",
        computes=tuple(1000.0 * step for step in STEPS),
    ),
    "OpenRLHF": Case("train.log", every_step(openrlhf), "eval_math_pass1", **validated(3, initial=None)),
    "OpenRLHF, asynchronous": Case("train.log", every_step(openrlhf, asynchronous=True), "reward"),
    "tinker-cookbook": Case("logs.log", every_step(tinker, first=0), "test/env/all/correct", **validated(3)),
    "tinker-cookbook, file": Case(
        "metrics.jsonl",
        lines({"step": s, "progress/batch": s, "env/all/correct": score(s), "time/total": 31.5} for s in STEPS),
        "env/all/correct",
    ),
    "AReaL": Case("trainer.log", every_step(areal, every=3), "eval-rollout/reward", **validated(3, initial=None)),
    "AReaL without an evaluation": Case(
        "trainer.log",
        every_step(areal),
        "rollout/reward",
        rates=tuple(round(score(step) - 0.1, 4) for step in STEPS),
        says=("as good by its name: ppo_actor/task_reward/avg",),
    ),
    "W&B, chart": Case("chart.csv", chart(), "eval/math/avg@8", axis="Step", **validated(1)),
    "W&B, history of prime-rl": Case("history.csv", history(), "train/agg/all/solver/reward/mean"),
    "TensorBoard, CSV": Case(
        "tb.csv",
        "Wall time,Step,Value\n" + "".join(f"{1.77e9 + s},{s},{score(s)}\n" for s in STEPS),
        "Value",
        axis="Step",
    ),
    "TensorBoard, JSON": Case(
        "tb.json", json.dumps([[1.77e9 + s, s, rate(s)] for s in (0, *STEPS)]), "Value", axis="Step", **validated(1)
    ),
}


@pytest.mark.parametrize("case", CASES.values(), ids=list(CASES))
def test_a_log_of_another_trainer(tmp_path, case):
    path = write(tmp_path, case.name, case.text)
    if case.refused:
        with pytest.raises(ValueError) as caught:
            read_curves(path)
        assert str(path) in str(caught.value) and case.refused in str(caught.value)
        assert "\n" not in str(caught.value)
        return
    (curve,) = read_curves(path)
    assert f"{len(case.computes)} points of {case.column} over {case.axis} (" in curve.read
    assert curve.compute == pytest.approx(case.computes) and curve.pass_rate == pytest.approx(case.rates)
    assert curve.initial == (case.initial if case.initial is None else pytest.approx(case.initial))
    assert all(words in curve.read for words in case.says)
    assert curve.notes == ()
