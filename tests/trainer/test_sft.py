"""The warm start: its examples, its schedule, and that its loss is the cross-entropy of the sampled tokens."""

import pytest
import torch
from command_line import command
from random_policies import completion_logprobs
from recipe_files import ROOT, SETTLED
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_scalerl.checkpoints.to_hf import to_hf
from megatron_scalerl.distributed import cpu_compat
from megatron_scalerl.prompts.sft_examples import read_examples
from megatron_scalerl.recipe import Recipe
from megatron_scalerl.recipe.sections import SftSection
from megatron_scalerl.tiny.build import TinyArguments, build
from megatron_scalerl.trainer.sft import _batches, run_sft, schedule


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    build(folder, TinyArguments(seed=1, train_prompts=4, held_out=4, sft_examples=400))
    yield folder
    cpu_compat.uninstall()


def recipe(tiny, **sft):
    return Recipe.model_validate(
        {
            "name": "warm",
            "steps": 1,
            "policy": {"path": str(tiny / "base_policy"), "dtype": "float32"},
            "prompts": {"path": str(tiny / "prompts.jsonl"), **SETTLED},
            "trainer": {"micro_batch_tokens": 512, "world_size": 2},
            "megatron": {"parallel": {"tensor_model_parallel_size": 2}, "model": {"sequence_parallel": True}},
            "sft": {"path": str(tiny / "sft.jsonl"), "threads": 1, "warmup_steps": 0, **sft},
        }
    )


def reference_loss(policy, samples):
    """Mean of -log pi over the loss-mask tokens of the samples, under the Hugging Face model."""
    model = AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32)
    total, count = 0.0, 0
    for s in samples:
        with torch.no_grad():
            chosen = completion_logprobs(model, s)[torch.tensor(s.rollout.loss_mask)]
        total, count = total - chosen.sum().item(), count + chosen.numel()
    return total / count


def test_the_schedule_warms_up_holds_and_decays():
    rate = schedule(SftSection(steps=900, lr=2e-3, warmup_steps=50, decay_from_share=0.5, min_lr_ratio=0.1))
    found = [rate(s) for s in (1, 25, 50, 450, 675, 900)]
    assert found == pytest.approx([4e-5, 1e-3, 2e-3, 2e-3, 1.1e-3, 2e-4])
    constant = schedule(SftSection(steps=10, lr=1e-3, warmup_steps=0, decay_from_share=1.0))
    assert [constant(s) for s in (1, 10)] == [1e-3, 1e-3]


@pytest.mark.parametrize(
    "override, said",
    [
        ("rewards.verifier=no.module:f", "rewards.verifier"),
        ("megatron.parallel.no_option=1", "megatron.parallel: no_option"),
        ("interruption.thinking_tokens=[90000,90000]", "too short for the longest sequence"),
        ("policy.lora={} policy.adapter={adapter}", "policy.adapter: a warm start would train policy.path"),
    ],
)
def test_the_command_makes_the_checks_of_a_run_before_it_trains(tiny, tmp_path, capsys, override, said):
    (tmp_path / "adapter").mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    policy = f"policy.path={tiny}/base_policy sft.path={tiny}/sft.jsonl prompts.path={tiny}/prompts.jsonl"
    override = override.replace("{adapter}", f"{tmp_path}/adapter")
    words = f"{ROOT}/recipes/tiny_cpu.yaml --out {tmp_path}/out {policy} {override}"
    assert command("sft")(words.split()) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_the_loss_is_the_cross_entropy_and_training_lowers_it(tiny, tmp_path):
    settings = recipe(tiny, steps=12, batch_size=16)
    tokenizer = AutoTokenizer.from_pretrained(settings.policy.path)
    first, *_, last = _batches(settings, read_examples(settings, tokenizer).samples)
    assert len(first) == 16 and sum(s.token_weight * sum(s.rollout.loss_mask) for s in first) == pytest.approx(1)
    base, one, twelve = tiny / "base_policy", tmp_path / "one", tmp_path / "twelve"
    report = run_sft(recipe(tiny, steps=1, batch_size=16), one, report=lambda line: None)
    assert report.loss == pytest.approx(reference_loss(base, first), rel=1e-5)
    lines = []
    report = run_sft(settings, twelve, report=lines.append)
    assert (
        len(lines) == 2
        and lines[0].startswith("sft: rows of text")
        and lines[1].startswith(f"sft step 12/12  loss {report.loss:.4f}")
    )
    assert report.learning_rate == pytest.approx(2e-4)
    assert report.loss < 0.8 * reference_loss(base, last)
    assert reference_loss(twelve, last) < report.loss
    assert AutoTokenizer.from_pretrained(twelve).get_vocab() == tokenizer.get_vocab()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "twelve"]


def test_skipped_rows_are_reported_and_the_rollouts_temperature_plays_no_part(tiny, tmp_path):
    settings = {"steps": 1, "batch_size": 8, "too_long": "skip"}
    cool, lines = recipe(tiny, **settings), []
    cool = cool.model_copy(
        update={
            "rollouts": cool.rollouts.model_copy(update={"temperature": 0.5}),
            "trainer": cool.trainer.model_copy(update={"micro_batch_tokens": 60}),
        }
    )
    report = run_sft(cool, tmp_path / "cool", report=lines.append)
    assert lines[1].startswith("sft: ") and " too long and skipped" in lines[1]
    tokenizer = AutoTokenizer.from_pretrained(cool.policy.path)
    [first] = _batches(cool, read_examples(cool, tokenizer).samples)
    assert report.loss == pytest.approx(reference_loss(tiny / "base_policy", first), rel=1e-5)


def test_a_failed_export_keeps_the_trained_weights(tiny, tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("megatron_scalerl.trainer.sft.to_hf", full)
        with pytest.raises(RuntimeError, match=r"No space left .* kept, export them with: megatron-scalerl convert"):
            run_sft(recipe(tiny, steps=1, batch_size=4), tmp_path / "out", report=lambda line: None)
    kept = tmp_path / ".out.weights"
    to_hf(kept, tmp_path / "out", like=tiny / "base_policy")
    assert (tmp_path / "out" / "model.safetensors").is_file()


@pytest.mark.parametrize(
    "content, message",
    [
        ("", "the file has no warm-start examples"),
        ('{"prompt": "1+1=", "completion": "2"}\n{"prompt"', r"line 2: the line is not JSON: "),
        ('{"prompt": "1+1="}\n', "line 1: there is no column 'completion'; the columns are prompt"),
        ('{"prompt": 3, "completion": "2"}\n', "line 1: 'prompt' is 3; it has to be a text"),
        (b'{"prompt": "\xff", "completion": "2"}\n', "line 1: the line is not JSON: .* invalid start byte"),
    ],
)
def test_bad_examples_are_named(tiny, tmp_path, content, message):
    path = tmp_path / "examples.jsonl"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=f"examples.jsonl: {message}"):
        run_sft(recipe(tiny, path=str(path)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_missing_file_and_a_full_folder_are_refused(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"none.jsonl: there is no such file of warm-start examples"):
        run_sft(recipe(tiny, path=str(tmp_path / "none.jsonl")), tmp_path / "out")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "note.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"full: .* a new or empty folder"):
        run_sft(recipe(tiny), tmp_path / "full")
    with pytest.raises(ValueError, match=r"sft.path is missing; name a .jsonl file"):
        run_sft(recipe(tiny, path=None), tmp_path / "out")
