"""Renames settings of version 0.2, and suggests keys in errors about unknown keys: by the names of other frameworks,
or by similar names."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

_NAMES = {
    "optimizer.lr or sft.lr": "learning_rate lr actor_learning_rate",
    "optimizer.clip_grad": "max_grad_norm grad_clip gradient_clipping",
    "megatron.parallel.tensor_model_parallel_size or engine.vllm.tensor_parallel_size": (
        "tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size"
    ),
    "megatron.parallel.pipeline_model_parallel_size or engine.vllm.pipeline_parallel_size": (
        "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size"
    ),
    "megatron.parallel.expert_model_parallel_size or engine.vllm.enable_expert_parallel": (
        "ep ep_size expert_parallel expert_parallel_size expert_model_parallel_size"
    ),
    "megatron.parallel.context_parallel_size": "cp cp_size context_parallel context_parallel_size",
    "trainer.world_size or engine.vllm.data_parallel_size": "dp dp_size data_parallel data_parallel_size",
    "megatron.parallel.expert_tensor_parallel_size": "etp etp_size expert_tensor_parallel_size",
    "trainer.world_size": "n_gpus_per_node",
    "trainer.micro_batch_tokens": "ppo_max_token_len_per_gpu ppo_micro_batch_size_per_gpu",
    "rollouts.max_staleness_steps": "k max_off_policy_steps max_staleness staleness",
    "rollouts.groups_per_batch or sft.batch_size": (
        "batch_size train_batch_size rollout_batch_size num_prompts_per_step ppo_mini_batch_size"
    ),
    "rollouts.group_size or validation.generations or evaluation.generations": (
        "n num_generations n_samples_per_prompt num_generations_per_prompt n_samples"
    ),
    "interruption.thinking_tokens and interruption.answer_tokens": (
        "max_tokens max_new_tokens max_response_length max_response_len max_completion_length"
    ),
    "prompts.max_prompt_tokens": "max_prompt_length",
    "steps or sft.steps": "max_steps num_steps total_steps total_training_steps",
    "curriculum.max_epochs": "epochs num_epochs num_train_epochs total_epochs",
    "policy.path": "model model.path model_path model_name_or_path pretrain",
    "policy.lora.rank": "r lora_rank",
    "policy.lora.alpha": "lora_alpha",
    "policy.lora.targets": "target_modules lora_target lora_target_modules",
    "policy.adapter": "adapter_name_or_path adapter_path lora_adapter_path lora_path",
    "checkpoint.every_steps": "save_freq save_interval save_steps",
    "validation.every_steps": "test_freq eval_interval eval_steps",
    "name": "experiment_name",
    "output_dir": "default_local_dir",
    "prompts.path": "train_files",
    "prompts.held_out_path": "val_files",
    "prompts.prompt_column": "prompt_key",
    "rewards.verifier": "custom_reward_function.path custom_reward_function.name",
    "advantages.normalize": "adv_estimator",
    "loss.name": "loss_type loss_mode",
    "loss.reduction": "loss_agg_mode",
    "loss.clip_low": "clip_ratio_low eps_clip",
    "loss.clip_high": "clip_ratio_high eps_clip_high",
    "engine.count": "num_engines",
    "engine.vllm.gpu_memory_utilization": "gpu_memory_utilization",
    "engine.vllm.max_model_len": "max_model_len",
    "engine.vllm.max_num_seqs": "max_num_seqs",
}
OTHER_NAMES = {name: setting for setting, names in _NAMES.items() for name in names.split()}
"""Name of a setting in other frameworks -> the recipe's setting with this meaning."""
OF_OLD_MEGATRON = frozenset(
    {
        "megatron.model.async_tensor_model_parallel_allreduce",
        "megatron.model.moe_extended_tp",
        "megatron.model.moe_use_legacy_grouped_gemm",
        "megatron.ddp.preserve_fp32_weights",
        "megatron.optimizer.muon_use_nesterov",
        "megatron.parallel.create_all_gather_group",
    }
)
"""Options that only Megatron-Core 0.16 had. The recipe of a run that began with 0.16 may still have such options."""
FORMER_KEYS: dict[str, tuple[object, str]] = {
    "weights.transaction": ("streamed", "engines pause during a weight update, and write each part on arrival"),
    "weights.anchor_every": (20, "the engines check every update with deltas against a digest"),
    "weights.store": ("", "engines that join get the weights from the trainer, between two steps"),
    "weights.store_gib": (64.0, "there is no store of weights"),
    "weights.link_gb_s": (0.0, "`report` shows the rate of weight updates, not compared with a link's rate"),
}
"""Deleted key of version 0.2 -> (default value, which is ignored; today's behavior, for the error about a value)."""
_RENAMED_KEYS = {"rewards.environment": "variables", "telemetry.trace_steps": "profile_steps"}
_RENAMED_VALUES = {
    "trainer.logit_backend": {"triton": "auto", "in_place": "auto"},
    "checkpoint.rollouts": {"parquet": "keep"},
    "weights.deltas": {"ulp": "absolute"},
}
"""Keys and values of version 0.2 -> their successors. Version 0.4 will refuse the former keys and values."""
_NEAR_SIBLING = 0.8
"""An error about an unknown key suggests a key of the same section if difflib's ratio of both is at least this."""
_NEAR_OTHER = 0.9
"""An error about an unknown key suggests a key of a different section if difflib's ratio of both is at least this."""
_FAR_SIBLING = 0.65
"""The ratio from which a key of the same section is suggested if no key reaches _NEAR_SIBLING or _NEAR_OTHER."""
_MOST_LISTED = 12
"""Largest number of keys that an error lists; for a section with more keys, the error names a file with all keys."""
_MOST_NEAREST = 3
"""Largest number of keys that an error suggests; if more keys are as similar, the error suggests no key."""


def setting_of(key: str) -> str:
    """The recipe's settings, joined by "or", that other frameworks call by the last part of `key`; empty for an
    unknown name."""
    parts = key.lower().replace("-", "_").split(".")
    return OTHER_NAMES.get(".".join(parts[-2:])) or OTHER_NAMES.get(parts[-1], "")


def rename_former(data: Mapping[str, Any], *, replace: bool) -> Iterator[str]:
    """Change settings of version 0.2 in `data`, a recipe, to those of today. Yields a clause for each change.

    replace: the former key of a renamed setting replaces a present value, as in an override. Else the schema refuses
    the former key beside the present key.
    """
    for key in (*FORMER_KEYS, *_RENAMED_KEYS, *_RENAMED_VALUES):
        section_name, _, name = key.partition(".")
        section = data.get(section_name)
        if not isinstance(section, dict) or name not in section:
            continue
        value = section[name]
        if key in FORMER_KEYS and value == FORMER_KEYS[key][0]:
            del section[name]
            yield f"{key} is ignored"
        elif key in _RENAMED_KEYS and (replace or _RENAMED_KEYS[key] not in section):
            # version 0.2 wrote null for no steps
            section[_RENAMED_KEYS[key]] = section.pop(name) or []
            yield f"{key} is now {_RENAMED_KEYS[key]}"
        elif isinstance(value, str) and value in _RENAMED_VALUES.get(key, ()):
            section[name] = _RENAMED_VALUES[key][value]
            yield f"{key}: {value} is now {section[name]}"


def innermost(key: str, value: object, valid: Iterable[str]) -> str:
    """Choose the key that an error about an unknown `key` names: the key itself or, for an unknown section, a key
    inside.

    A key inside is named if no section in `valid` is similar. Among the keys inside, a key that other frameworks have
    comes first.
    """
    section, _, last = key.rpartition(".")
    if _nearest(last, [name for name in valid if name.rpartition(".")[0] == section], _NEAR_SIBLING):
        return key
    keys = list(_innermost(key, value))
    return next(filter(setting_of, keys), keys[0])


def _innermost(key: str, value: object) -> Iterator[str]:
    if not isinstance(value, Mapping) or not value:
        yield key
        return
    for name, inner in value.items():
        yield from _innermost(f"{key}.{name}", inner)


def check_keys(
    place: str,
    keys: Iterable[object],
    valid: Iterable[str],
    *,
    expected: str,
    in_recipe: bool = False,
    listed: str = "",
) -> None:
    """Raise ValueError for the first of the `keys` that is not `valid`; arguments as for `unknown_key`.

    in_recipe: `place` is a section of the recipe, so the error may translate the key of another framework.
    """
    names = list(valid)
    for key in keys:
        if f"{place}.{key}" in OF_OLD_MEGATRON:
            raise ValueError(
                f"{place}.{key} exists only in Megatron-Core 0.16; delete the key (the run can still resume)"
            )
        if key not in names:
            setting = setting_of(f"{place}.{key}") if in_recipe else ""
            text = unknown_key(str(key), names, expected=expected, setting=setting, listed=listed)
            raise ValueError(f"{place}: {text}")


def unknown_key(
    key: str,
    valid: Iterable[str],
    *,
    expected: str,
    setting: str = "",
    kind: str = "keys",
    listed: str = "",
) -> str:
    """Return an error message: "KEY is not ...; the nearest is ...", or "...; keys here: a, b, c" without a near key.

    A dotted key is compared with the keys of the same section, then by the last part with all keys. expected: the
    kind of the `valid` names, as in "a recipe key"; kind: a plural noun for the `valid` names. setting: the recipe's
    names for KEY (`setting_of`). listed: a file that lists the keys, for when one line has no room.
    """
    text = f"{key} is not {expected}"
    if setting:
        return f"{text}; it is set by {setting}"
    names = list(valid)
    section, last = key.rpartition(".")[::2]
    siblings = [name for name in names if name.rpartition(".")[0] == section]
    all_names = [name for name in names if ".NAME." not in name]
    # the lowest limit comes last, and for the same section alone, because a short name is somewhat like many names
    for candidates, likeness in ((siblings, _NEAR_SIBLING), (all_names, _NEAR_OTHER), (siblings, _FAR_SIBLING)):
        if nearest := _nearest(last, candidates, likeness):
            return f"{text}; the nearest is {' or '.join(nearest)}"
    if 0 < len(siblings) <= _MOST_LISTED:
        return f"{text}; {kind} here: {', '.join(name.rpartition('.')[2] for name in siblings)}"
    return f"{text}; all {kind} are listed in {listed}" if listed else text


def _nearest(last: str, names: Sequence[str], likeness: float) -> list[str]:
    """The names whose last part has a difflib ratio to `last` of at least `likeness`; empty if more than
    _MOST_NEAREST."""
    lasts = {name.rpartition(".")[2] for name in names}
    alike = get_close_matches(last, lasts, n=_MOST_NEAREST + 1, cutoff=likeness)
    nearest = [name for name in names if name.rpartition(".")[2] in alike]
    return nearest if len(nearest) <= _MOST_NEAREST else []
