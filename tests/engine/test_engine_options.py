"""The command line of a vLLM server, without starting one."""

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest
from engine_recipes import recipe_for

from megatron_scalerl.engine import options as engine_options
from megatron_scalerl.engine.client import WHOLE_DISTRIBUTION, SamplingSpec, _sampling
from megatron_scalerl.engine.interruption import Plan
from megatron_scalerl.engine.options import (
    check_options,
    engine_arguments,
    engine_environment,
    training_seeds,
    vllm_options,
)


def arguments(tmp_path, vllm=None, **sections):
    recipe = recipe_for(tmp_path, vllm=vllm, **sections)
    return engine_arguments(recipe, host="127.0.0.1", port=8123)


def value(arguments, flag):
    assert arguments.count(flag) == 1
    return arguments[arguments.index(flag) + 1]


def test_vllm_options_pass_through_unrenamed(tmp_path):
    found = arguments(tmp_path, {"max_num_seqs": 7, "enforce_eager": False, "hf_overrides": {"x": 1}})
    assert value(found, "--max-num-seqs") == "7"
    assert "--no-enforce-eager" in found and "--enforce-eager" not in found
    assert json.loads(value(found, "--hf-overrides")) == {"x": 1, "head_dtype": "float32"}


def test_statistics_are_off_unless_the_recipe_turns_them_on(tmp_path):
    """vLLM has the flag alone, and no negative form of it."""
    assert "--disable-log-stats" in arguments(tmp_path)
    found = arguments(tmp_path, {"disable_log_stats": False})
    assert not [word for word in found if "log-stats" in word]


def test_what_the_recipe_decides(tmp_path):
    other_settings = {"policy": {"logits": "model", "dtype": "bfloat16"}, "rollouts": {"temperature": 0.7}}
    plain, other = arguments(tmp_path), arguments(tmp_path, **other_settings)
    assert value(plain, "--logprobs-mode") == "raw_logprobs"
    assert value(other, "--logprobs-mode") == "processed_logprobs"
    assert json.loads(value(other, "--hf-overrides")) == {"head_dtype": "model"}
    assert value(other, "--dtype") == "bfloat16"
    assert value(plain, "--generation-config") == "vllm"
    assert value(plain, "--logits-processors").endswith(":ForcedTokens")
    assert "--no-enable-prefix-caching" in plain
    assert json.loads(value(plain, "--weight-transfer-config")) == {"backend": "msrl"}
    assert value(plain, "--middleware").endswith("SecretMiddleware")


def test_the_users_middleware_runs_after_the_secret_check(tmp_path):
    """vLLM makes the last one of the list the outermost."""
    found = arguments(tmp_path, {"middleware": ["mine.First", "mine.Second"]})
    given = [found[at + 1] for at, flag in enumerate(found) if flag == "--middleware"]
    assert given[:2] == ["mine.First", "mine.Second"] and given[2].endswith(".SecretMiddleware")


@pytest.mark.parametrize("text", ["%s", '{"text_config": %s}'])
@pytest.mark.parametrize("on", [True, False])
def test_llama4_attention_temperature_is_that_of_the_policy(tmp_path, text, on):
    assert "--override-generation-config" not in arguments(tmp_path)
    for family in ("qwen3", "llama4_text"):
        policy = json.dumps({"model_type": family, "attn_temperature_tuning": on})
        (tmp_path / "config.json").write_text(text % policy)
        found = arguments(tmp_path)
        assert ("--override-generation-config" in found) == (family == "llama4_text")
    assert json.loads(value(found, "--override-generation-config")) == {"attn_temperature_tuning": on}


TLS = ("keyfile", "certfile", "ca_certs", "cert_reqs", "ciphers")


@pytest.mark.parametrize(
    "options, line",
    [
        ({"max_model_length": 5}, r"engine\.vllm: max_model_length is not .*; the nearest is max_model_len$"),
        ({"dtype": "float32"}, r"engine\.vllm\.dtype: .*set by policy\.dtype"),
        ({"enable_prefix_caching": True}, "enable_prefix_caching: True cannot be set here; the option is fixed"),
        (
            {"hf_overrides": {"head_dtype": "model"}},
            r"hf_overrides: head_dtype 'model' cannot be set here; set policy\.logits",
        ),
        ({"hf_overrides": "{}"}, r"engine\.vllm\.hf_overrides: expected a mapping, found '{}'"),
        *(({f"ssl_{name}": "x"}, rf"engine\.vllm\.ssl_{name}: 'x' cannot be set here; .* fixed") for name in TLS),
        ({"generation_config": "auto"}, "generation_config: 'auto' cannot be set here; the option is fixed"),
        ({"data_parallel_backend": "ray"}, "data_parallel_backend: ray cannot be used"),
        ({"tokenizer": "other"}, r"engine\.vllm\.tokenizer: .*set by policy\.path"),
        (
            {"override_generation_config": {"attn_temperature_tuning": True}},
            r"override_generation_config: .* set by config\.json \(attn_temperature_tuning\)",
        ),
    ],
)
def test_refused_options(options, line):
    with pytest.raises(ValueError, match=line):
        check_options(options)


@pytest.mark.parametrize("name", engine_options.CHANGES_SAMPLING)
def test_what_changes_sampling_is_refused_with_its_reason(name):
    with pytest.raises(ValueError) as error:
        check_options({name: 2})
    text = str(error.value)
    assert text.startswith(f"engine.vllm.{name} cannot be set: it ")
    assert text.endswith(engine_options.CHANGES_SAMPLING[name]) and "\n" not in text


@pytest.mark.parametrize(
    "options",
    [
        {"quantization": "fp8"},
        {"kv_cache_dtype": "fp8"},
        {"max_logprobs": 5},
        {"reasoning_parser": "x"},
        {"speculative_config": None},
    ],
)
def test_options_that_do_not_change_sampling_pass(options):
    check_options(options)


def test_every_sampling_option_of_vllm_is_in_the_table():
    """By name: a new version of vLLM with a new such option fails here until it is reviewed."""
    telling = re.compile(r"sampl|logit|logprob|penalt|top_?[kp]|min_p|spec|watermark|generation_config|diffusion")
    looked_at = {
        "enable_batch_sharded_sampling",
        "kv_cache_metrics_sample",
        "logprobs_mode",
        "max_logprobs",
        "override_generation_config",
        "per_request_spec_decode_metrics",
        "return_sampling_mask",
        "generation_config",
        "sparse_indexer_topk_backend",
        "specialize_active_lora",
        "watermark",
    }
    found = {name for name in vllm_options() if telling.search(name)}
    assert found - engine_options.CHANGES_SAMPLING.keys() == looked_at


def test_every_field_of_a_request_that_shapes_a_completion_is_sent_or_refused():
    """Against vLLM's own class, read and not imported: a field that a new version adds fails here."""
    root = next(iter(importlib.util.find_spec("vllm").submodule_search_locations))
    tree = ast.parse((Path(root) / "sampling_params.py").read_text())
    [params] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "SamplingParams"]
    fields = {n.target.id for n in params.body if isinstance(n, ast.AnnAssign) and not n.target.id.startswith("_")}
    of_the_answers_form = {
        "prompt_logprobs",
        "prompt_logprob_token_ids",
        "prompt_logprob_start",
        "logprob_token_ids",
        "flat_logprobs",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "include_stop_str_in_output",
        "output_kind",
        "stream_interval",
        "skip_clone",
        "output_text_buffer_length",
        "skip_reading_prefix_cache",
        "routed_experts_prompt_start",
    }
    plan = Plan(cut=3, phrase_ids=(5,), think_end_ids=(5,), answer_budget=2, eos_id=2)
    sent = _sampling(SamplingSpec(max_tokens=9, interruption=plan))
    assert fields - of_the_answers_form == sent.keys()
    assert {**sent, **WHOLE_DISTRIBUTION} == sent, "nothing of a request's own overwrites them"


def test_an_installed_logits_processor_is_refused(tmp_path, monkeypatch):
    """A real distribution on the path, as pip installs it: vLLM loads its entry point into every engine."""
    folder = tmp_path / "meddler-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: meddler\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[vllm.logits_processors]\nmeddle = meddler:Processor\n")
    check_options({})
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"vllm\.logits_processors: .* meddle = meddler:Processor"):
        check_options({})


DETERMINISTIC = {"deterministic": True, "max_staleness_steps": 0}
REPLAY = {"rollouts": {"routing_replay": True, "kv_cache": "recompute"}}


def test_expert_choices_select_the_model_runner_that_reports_them(tmp_path, monkeypatch):
    monkeypatch.setattr(engine_options, "on_cpu", lambda: False)
    found = arguments(tmp_path, **REPLAY)
    assert "--enable-return-routed-experts" in found and "--enable-prefix-caching" in found
    assert value(found, "--logits-processors") == "megatron_scalerl.engine.forced_on_device:ForcedTokens"
    assert environment(recipe_for(tmp_path, **REPLAY))["VLLM_USE_V2_MODEL_RUNNER"] == "1"


def test_no_expert_choices_on_cpus_nor_without_their_conditions(tmp_path):
    with pytest.raises(ValueError, match=r"routing_replay: .* CPU build is installed"):
        arguments(tmp_path, **REPLAY)
    with pytest.raises(ValueError, match=r"routing_replay needs rollouts\.kv_cache recompute; .* is keep"):
        recipe_for(tmp_path, rollouts={"routing_replay": True})


def test_training_requests_have_seeds_where_a_seed_costs_nothing_or_is_needed(tmp_path, monkeypatch):
    assert training_seeds(recipe_for(tmp_path)), "on CPUs"
    monkeypatch.setattr(engine_options, "on_cpu", lambda: False)
    assert not training_seeds(recipe_for(tmp_path))
    assert training_seeds(recipe_for(tmp_path, **REPLAY)), "one kernel for all rows"
    assert training_seeds(recipe_for(tmp_path, rollouts=DETERMINISTIC))


def test_engines_draw_from_different_generators(tmp_path):
    first, second = (value(arguments(tmp_path), "--seed") for _ in range(2))
    assert first != second
    fixed = arguments(tmp_path, rollouts=DETERMINISTIC)
    assert value(fixed, "--seed") == "0" and "--no-async-scheduling" in fixed
    assert "--no-async-scheduling" not in arguments(tmp_path)


def test_experts_stay_where_updates_can_write_them(tmp_path, monkeypatch):
    """vLLM's default on Blackwell rearranges them."""
    assert "--moe-backend" not in arguments(tmp_path)
    monkeypatch.setattr(engine_options, "on_cpu", lambda: False)
    assert value(arguments(tmp_path), "--moe-backend") == "triton"
    assert value(arguments(tmp_path, engine={"vllm": {"moe_backend": "cutlass"}}), "--moe-backend") == "cutlass"


def environment(recipe, **options):
    return engine_environment(recipe, secret="s", ready_fd=9, listen_fd=8, devices="0,1", **options)


def test_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    env = environment(recipe_for(tmp_path, engine={"threads": 3}))
    assert (env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"], env["MSRL_SECRET"]) == ("3", "0,1", "s")
    assert (env["MSRL_LISTEN_FD"], env["MSRL_READY_FD"]) == ("8", "9")
    assert env["VLLM_USE_FLASHINFER_SAMPLER"] == "0", "nothing of it is used, and it would be compiled"
    assert env["VLLM_SERVER_DEV_MODE"] == "1" and "VLLM_CPU_KVCACHE_SPACE" not in env


@pytest.mark.parametrize(
    "options, given, nccl",
    [({}, "=ib0", "lo"), ({"interface": "eth1"}, None, "eth1"), ({"interface": "eth1"}, "=ib0", "=ib0")],
)
def test_between_hosts_nccl_uses_the_route_or_what_the_user_set(tmp_path, monkeypatch, options, given, nccl):
    monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
    if given is not None:
        monkeypatch.setenv("NCCL_SOCKET_IFNAME", given)
    env = environment(recipe_for(tmp_path), **options)
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"], env["VLLM_HOST_IP"]) == ("lo", nccl, "127.0.0.1")


@pytest.mark.parametrize(
    "name, given, expected", [("async_scheduling", True, "false"), ("data_parallel_size", 2, "1")]
)
def test_deterministic_refuses_options_that_make_batches_depend_on_time(tmp_path, name, given, expected):
    message = f"engine.vllm.{name}: {given} does not go with rollouts.deterministic, which needs {expected}"
    with pytest.raises(ValueError, match=re.escape(message)):
        arguments(tmp_path, {name: given}, rollouts=DETERMINISTIC)
