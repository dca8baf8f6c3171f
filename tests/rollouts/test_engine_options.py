"""The command line of a vLLM server, without starting one."""

import json

import pytest
from engine_recipes import recipe_for

from megatron_scalerl.rollouts import engine_options
from megatron_scalerl.rollouts.engine_options import check_options, engine_arguments, engine_environment


def arguments(tmp_path, vllm=None, **sections):
    recipe = recipe_for(tmp_path, vllm=vllm, **sections)
    return engine_arguments(recipe, host="127.0.0.1", port=8123, transport="gloo")


def value(arguments, flag):
    assert arguments.count(flag) == 1
    return arguments[arguments.index(flag) + 1]


def test_vllm_options_pass_through_unrenamed(tmp_path):
    found = arguments(tmp_path, {"max_num_seqs": 7, "enforce_eager": False, "hf_overrides": {"x": 1}})
    assert value(found, "--max-num-seqs") == "7"
    assert "--no-enforce-eager" in found and "--enforce-eager" not in found
    assert json.loads(value(found, "--hf-overrides")) == {"x": 1, "head_dtype": "float32"}


def test_what_the_recipe_decides(tmp_path):
    other_settings = {"policy": {"logits": "model", "dtype": "bfloat16"}, "rollouts": {"top_p": 0.9}}
    plain, other = arguments(tmp_path), arguments(tmp_path, **other_settings)
    assert value(plain, "--logprobs-mode") == "raw_logprobs"
    assert value(other, "--logprobs-mode") == "processed_logprobs"
    assert json.loads(value(other, "--hf-overrides")) == {"head_dtype": "model"}
    assert value(other, "--dtype") == "bfloat16"
    assert "--no-enable-prefix-caching" in plain
    assert json.loads(value(plain, "--weight-transfer-config")) == {"backend": "msrl_gloo"}
    assert value(plain, "--middleware").endswith("SecretMiddleware")


def test_one_s_own_logits_processor_joins_ours(tmp_path):
    found = arguments(tmp_path, {"logits_processors": ["mine:Class"]})
    at = found.index("--logits-processors")
    assert found[at + 1].endswith(":ForcedTokens") and found[at + 2] == "mine:Class"


def test_one_s_own_middleware_stands_behind_the_secret(tmp_path):
    """vLLM makes the last one of the list the outermost."""
    found = arguments(tmp_path, {"middleware": ["mine.First", "mine.Second"]})
    given = [found[at + 1] for at, flag in enumerate(found) if flag == "--middleware"]
    assert given[:2] == ["mine.First", "mine.Second"] and given[2].endswith(".SecretMiddleware")


@pytest.mark.parametrize("text", ["%s", '{"text_config": %s}'])
@pytest.mark.parametrize("on", [True, False])
def test_llama4_attention_temperature_is_that_of_the_policy(tmp_path, text, on):
    policy = json.dumps({"model_type": "llama4_text", "attn_temperature_tuning": on})
    (tmp_path / "config.json").write_text(text % policy)
    found = json.loads(value(arguments(tmp_path), "--override-generation-config"))
    assert found == {"attn_temperature_tuning": on}
    given = {"override_generation_config": {"max_new_tokens": 5}}
    found = json.loads(value(arguments(tmp_path, given), "--override-generation-config"))
    assert found == {"attn_temperature_tuning": on, "max_new_tokens": 5}


def test_other_families_have_no_attention_temperature(tmp_path):
    assert "--override-generation-config" not in arguments(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "qwen3"}')
    assert "--override-generation-config" not in arguments(tmp_path)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"max_model_length": 5}, r"engine\.vllm\.max_model_length: .*the nearest is max_model_len\), found none"),
        ({"max_num_seq": 5}, r"engine\.vllm\.max_num_seq: .*the nearest is max_num_seqs\)"),
        ({"dtype": "float32"}, r"engine\.vllm\.dtype: .*set by policy\.dtype"),
        ({"enable_prefix_caching": True}, r"engine\.vllm\.enable_prefix_caching: .*found one fixed"),
        ({"hf_overrides": {"head_dtype": "model"}}, r"hf_overrides: expected no head_dtype \(set policy\.logits\)"),
    ],
)
def test_refused_options(options, line):
    with pytest.raises(ValueError, match=line):
        check_options(options)


REPLAY = {"rollouts": {"routing_replay": True, "kv_cache": "recompute"}, "interruption": {"enabled": False}}


def test_expert_choices_are_asked_of_the_runner_that_reports_them(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_options, "on_cpu", lambda: False)
    found = arguments(tmp_path, **REPLAY)
    assert "--enable-return-routed-experts" in found and "--enable-prefix-caching" in found
    assert "--logits-processors" not in found
    env = engine_environment(recipe_for(tmp_path, **REPLAY), secret="s", ready_fd=9, listen_fd=8, devices=None)
    assert env["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_no_expert_choices_on_cpus_nor_without_their_conditions(tmp_path):
    with pytest.raises(ValueError, match=r"routing_replay: expected vLLM for GPUs.* found the build for CPUs"):
        arguments(tmp_path, **REPLAY)
    for part, found in (("rollouts", "false and keep"), ("interruption", "true and recompute")):
        other = {**REPLAY, part: {"routing_replay": True} if part == "rollouts" else {}}
        with pytest.raises(ValueError, match=f"routing_replay: expected .* found {found}"):
            recipe_for(tmp_path, **other)


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    recipe = recipe_for(tmp_path, engine={"threads": 3})
    env = engine_environment(recipe, secret="s", ready_fd=9, listen_fd=8, devices="0,1")
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"], env["MSRL_SECRET"]) == ("3", "0,1", "s")
    assert (env["MSRL_LISTEN_FD"], env["MSRL_READY_FD"]) == ("8", "9")
    assert env["VLLM_SERVER_DEV_MODE"] == "1" and "VLLM_CPU_KVCACHE_SPACE" not in env
