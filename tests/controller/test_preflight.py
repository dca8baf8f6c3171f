"""User errors before a run starts: one line with key or row, expected and found; no file is written."""

import json
import re
import shutil
import socket
from pathlib import Path

import pytest
from adapter_folders import save_adapter
from json_lines import write
from refusals import refused
from rich.console import Console

from megatron_scalerl.checkpoints.hf_folder import family_of_folder
from megatron_scalerl.controller.preflight import check_answers, check_inputs
from megatron_scalerl.controller.run_folder import RunFolder, check_recipe
from megatron_scalerl.controller.train import train
from megatron_scalerl.recipe.file import load_recipe
from megatron_scalerl.recipe.sections import LoraSection
from megatron_scalerl.recipe.tasks import tasks_of

ROOT = Path(__file__).parents[2]


def settings(tiny, *more):
    return [
        f"policy.path={tiny / 'base_policy'}",
        f"prompts.path={tiny / 'prompts.jsonl'}",
        f"prompts.held_out_path={tiny / 'held_out.jsonl'}",
        *more,
    ]


def recipe(tiny, *more):
    return load_recipe(ROOT / "recipes/tiny_cpu.yaml", settings(tiny, *more))


def resolved(tiny, *more):
    given = recipe(tiny, *more)
    return check_inputs(given).resolved(given)


def refusal(tiny, *more):
    with pytest.raises(ValueError) as error:
        check_inputs(recipe(tiny, *more))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_a_valid_recipe_passes_and_gets_its_context_length(tiny):
    inputs = check_inputs(recipe(tiny))
    # 32 prompt + 52 thinking + 2 forced + 4 answer + 1 forced end
    assert inputs.longest_sequence == 91
    assert inputs.resolved(recipe(tiny)).engine.vllm["max_model_len"] == 91
    assert (len(inputs.prompts.training), len(inputs.prompts.held_out)) == (100, 20)


def test_prompts_that_render_otherwise_than_before_are_refused(tiny, tmp_path):
    """The tokenizer's template, a prompt file, the date: whatever changes one token."""
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    more = ("prompts.chat_template=true", f"output_dir={tmp_path / 'runs'}")
    begun = resolved(folder, *more)
    RunFolder(begun).close()
    check_recipe(resolved(folder, *more))
    assert check_inputs(begun).prompts.digest() == begun.prompts.digest
    template = folder / "base_policy/chat_template.jinja"
    template.write_text(template.read_text().replace("{% for", "1{% for", 1))
    with refused(r"a prompt file, the tokenizer or its template has changed since the run"):
        check_recipe(resolved(folder, *more))
    with refused(rf"prompts.digest: a prompt file.*the digest was {begun.prompts.digest}, now"):
        check_inputs(begun)


def test_a_run_with_the_workspace_that_was_the_default_goes_on(tiny, tmp_path):
    folder = f"output_dir={tmp_path / 'runs'}"
    RunFolder(resolved(tiny, folder, "trainer.logit_workspace_mb=512")).close()
    check_recipe(resolved(tiny, folder))


def test_a_run_with_an_option_that_has_left_goes_on_without_it(tiny, tmp_path):
    folder = f"output_dir={tmp_path / 'runs'}"
    checked = check_inputs(recipe(tiny, folder))
    RunFolder(checked.resolved(recipe(tiny, folder, "megatron.model.moe_use_legacy_grouped_gemm=true"))).close()
    check_recipe(checked.resolved(recipe(tiny, folder)))


def test_a_run_is_not_resumed_with_other_adapters(tiny, tmp_path, monkeypatch):
    folder = tmp_path / "adapter"
    save_adapter(folder, family_of_folder(tiny / "base_policy"), LoraSection())
    weights = folder / "adapter_model.safetensors"
    monkeypatch.chdir(tmp_path)

    more = (f"output_dir={tmp_path / 'runs'}", "policy.lora={}")
    begun = resolved(tiny, *more, f"policy.adapter={folder}")
    RunFolder(begun).close()
    check_recipe(resolved(tiny, *more, "policy.adapter=adapter"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 0x80  # the sign of the last number
    weights.write_bytes(content)
    with refused(rf"policy.digest is '{begun.policy.digest}'"):
        check_recipe(resolved(tiny, *more, f"policy.adapter={folder}"))


def test_a_run_records_its_policy_and_is_not_resumed_with_another(tiny, tmp_path):
    folder = shutil.copytree(tiny, tmp_path / "tiny")
    runs = f"output_dir={tmp_path / 'runs'}"
    begun = resolved(folder, runs)
    RunFolder(begun).close()
    (folder / "base_policy/README.md").write_text("What is no part of the policy does not count.")
    check_recipe(resolved(folder, runs))
    [weights] = (folder / "base_policy").glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    changed = resolved(folder, runs)
    message = rf"policy.digest is '{begun.policy.digest}' .* '{changed.policy.digest}' here"
    with refused(message):
        check_recipe(changed)
    written = Path(begun.run_dir, "recipe.yaml")
    written.write_text(written.read_text().replace(begun.policy.digest, "null"))
    check_recipe(changed)


@pytest.mark.parametrize(
    "override, message",
    [
        ("trainer.micro_batch_tokens=64", "trainer.micro_batch_tokens: 64 is too short for the longest sequence, 91"),
        ("interruption.thinking_tokens=[4000, 5000]", "max_position_embeddings of the policy: .* is too short"),
        (
            "engine.vllm.max_model_len=89",
            "engine.vllm.max_model_len: 89 is too short for the longest sequence, 91 tokens",
        ),
        (
            'engine.vllm.hf_overrides={"head_dtype": "model"}',
            "head_dtype 'model' cannot be set here; set policy.logits",
        ),
    ],
)
def test_settings_that_cannot_work(tiny, override, message):
    assert re.search(message, refusal(tiny, override))


def test_no_held_out_prompts_but_validation(tiny):
    message = refusal(tiny, "prompts.held_out_path=null", "prompts.held_out=0")
    assert message.startswith("validation.every_steps: there are no held-out prompts")


def test_vocabularies_that_disagree(tiny, tmp_path):
    policy = tmp_path / "policy"
    shutil.copytree(tiny / "base_policy", policy)
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps(config | {"vocab_size": 8}))
    assert "vocab" in refusal(tiny, f"policy.path={policy}")


def test_a_port_in_use(tiny):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert refusal(tiny, f"engine.port={port}") == f"engine.port: 127.0.0.1:{port} is in use; choose a free port"


def code_file(tmp_path, *answers):
    file = tmp_path / "code.jsonl"
    write(file, [{"prompt": f"{n};+2=", "answer": a} for n, a in enumerate(answers)])
    return file


def mixture(tiny, tmp_path, *answers):
    file = code_file(tmp_path, *answers)
    code = f"{{path: {file}, weight: 1, verifier: code, held_out: 1}}"
    math = f"{{path: {tiny / 'prompts.jsonl'}, held_out_path: {tiny / 'held_out.jsonl'}, weight: 3}}"
    return f"prompts.tasks={{code: {code}, math: {math}}}", "prompts.path=null", "prompts.held_out_path=null"


TESTS = '[{"input": "", "output": "7"}]'


def test_a_mixture_is_checked_task_by_task(tiny, tmp_path):
    inputs = check_inputs(recipe(tiny, *mixture(tiny, tmp_path, TESTS, TESTS, TESTS)))
    assert [r.key for r in inputs.prompts.reports] == ["prompts.tasks.code", "prompts.tasks.math"]
    assert [p.task for p in inputs.prompts.training] == ["code"] * 2 + ["math"] * 100
    assert [p.task for p in inputs.prompts.held_out] == ["code"] + ["math"] * 20
    settings = [*mixture(tiny, tmp_path, TESTS, TESTS), "prompts.tasks.code.held_out=0"]
    said = "validation.every_steps: there are no held-out prompts to validate on; set prompts.tasks.code.held_out"
    assert refusal(tiny, *settings) == said
    assert "there is no such file or folder of prompts" in refusal(
        tiny, *settings, "prompts.tasks.code.path=nowhere.jsonl"
    )


def test_tests_that_the_verifier_code_cannot_run_are_named_by_row(tiny, tmp_path):
    said = "code.jsonl: line 3: 'answer': the tests are Python without an assertion, so every program would pass"
    assert refusal(tiny, *mixture(tiny, tmp_path, TESTS, "f(1)", "f(2)")).endswith(said)
    single = refusal(tiny, f"prompts.path={code_file(tmp_path, '4')}", "rewards.verifier=code")
    assert "line 1: 'answer': unit tests have to be" in single


def test_tests_that_pay_wrong_programs_are_reported_and_change_no_digest(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "code.jsonl"
    tests = ("assert f(1)", *(f"assert f({number}) == 2" for number in range(3)))
    write(file, [{"prompt": "Write f.", "answer": text} for text in tests])
    settings = (f"prompts.path={file}", "prompts.held_out_path=null", "prompts.held_out=0", "rewards.verifier=code")
    prompts = check_inputs(recipe(tiny, *settings, "validation.every_steps=0")).prompts
    said = f"{file}: line 1: 'answer': its tests pass a program that returns a wrong value"
    assert prompts.reports[0].unusable == (said,) and prompts.reports[0].training == 3 and len(prompts.training) == 4
    assert prompts.problems == {prompts.training[0].prompt_id: said.partition("'answer': ")[2]}
    monkeypatch.setattr("megatron_scalerl.rewards.code_checks.LOAD_S", -1.0)
    next((tmp_path / "megatron_scalerl/checks").iterdir()).unlink()
    unknown = check_inputs(recipe(tiny, *settings, "validation.every_steps=0")).prompts
    assert unknown.digest() == prompts.digest() and [*unknown.problems.values()] == [None] * 4
    assert any("0 of 4 references were checked" in line for line in unknown.lines())


@pytest.mark.parametrize("tests", ["assert f(1)", "f(1)"])
def test_a_file_that_repeats_a_row_with_bad_tests_is_refused(tiny, tmp_path, monkeypatch, tests):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    file = tmp_path / "code.jsonl"
    file.write_text(10 * (json.dumps({"prompt": "Write f.", "answer": tests}) + "\n"))
    said = refusal(tiny, f"prompts.path={file}", "rewards.verifier=code")
    assert f"{file}: 1 of 10 rows cannot be learned from, such as {file}: line 1: 'answer': " in said


def test_of_many_mathematical_references_a_sample_is_checked(tiny, monkeypatch):
    monkeypatch.setattr("megatron_scalerl.controller.preflight.MOST_REFERENCES", 5)
    (task,) = tasks_of(recipe(tiny))
    answers = [("q", text, {}) for text in ("see the figure", *(f"\\frac{{1}}{{{n}}}" for n in range(3, 20)), "7")]
    problems, tried = check_answers(task, answers)
    assert tried.count(None) == 13 and tried[-1] == "" and set(filter(None, problems)) <= {problems[0]}
    assert check_answers(task, answers[::-1]) == (problems[::-1], tried[::-1])


def test_references_are_parsed_once_and_not_at_each_command(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (task,) = tasks_of(recipe(tiny))
    answers = [("q", text, {}) for text in ("Half of 6.\n#### 3", "\\frac{1}{3}", "see the figure")]
    checked = check_answers(task, answers)
    assert checked[0][:2] == ["", ""] and "is text" in checked[0][2]
    asked = []
    check = "megatron_scalerl.controller.preflight.check_references"
    monkeypatch.setattr(check, lambda texts: asked.append(texts) or [""] * len(texts))
    assert check_answers(task, answers) == checked and not asked
    check_answers(task, answers[:2])
    assert len(asked) == 1, "other references are checked"


def test_a_host_that_cannot_isolate_programs_is_refused_before_any_process(tiny, tmp_path, monkeypatch):
    """A stand-in for a host without the sandbox's system calls."""
    monkeypatch.setattr("megatron_scalerl.rewards.sandbox_probe.is_supported", lambda: False)
    settings = mixture(tiny, tmp_path, TESTS, TESTS)
    assert refusal(tiny, *settings).startswith("rewards.verifier code: this host cannot isolate programs")
    check_inputs(recipe(tiny))


def test_an_unknown_verifier_leaves_no_folder(tiny, tmp_path):
    with refused("nosuchmodule"):
        train(recipe(tiny, f"output_dir={tmp_path}", "rewards.verifier=nosuchmodule:check"), Console())
    assert list(tmp_path.iterdir()) == []
