"""Settings of a recipe by the names that other frameworks have for them.

Error messages for unknown keys, which name the key that was meant, or those that there are.
"""

from collections.abc import Collection, Iterable
from difflib import SequenceMatcher

_NAMES = {
    ("optimizer.lr", "sft.lr"): "learning_rate lr actor_learning_rate",
    ("optimizer.clip_grad",): "max_grad_norm grad_clip gradient_clipping",
    ("megatron.parallel.tensor_model_parallel_size", "engine.vllm.tensor_parallel_size"): (
        "tp tp_size tensor_parallel tensor_parallel_size tensor_model_parallel_size"
    ),
    ("megatron.parallel.pipeline_model_parallel_size", "engine.vllm.pipeline_parallel_size"): (
        "pp pp_size pipeline_parallel pipeline_parallel_size pipeline_model_parallel_size"
    ),
    ("megatron.parallel.expert_model_parallel_size", "engine.vllm.enable_expert_parallel"): (
        "ep ep_size expert_parallel expert_parallel_size expert_model_parallel_size"
    ),
    ("megatron.parallel.context_parallel_size",): "cp cp_size context_parallel context_parallel_size",
    ("trainer.world_size", "engine.vllm.data_parallel_size"): "dp dp_size data_parallel data_parallel_size",
    ("megatron.parallel.expert_tensor_parallel_size",): "etp etp_size expert_tensor_parallel_size",
    ("rollouts.max_staleness_steps",): "k max_off_policy_steps max_staleness staleness",
    (
        "rollouts.groups_per_batch",
        "sft.batch_size",
    ): "batch_size train_batch_size rollout_batch_size num_prompts_per_step",
    ("rollouts.group_size", "validation.generations", "evaluation.generations"): (
        "n num_generations n_samples_per_prompt num_generations_per_prompt n_samples"
    ),
    ("interruption.thinking_tokens and interruption.answer_tokens", "rewards.length_penalty.max_tokens"): (
        "max_tokens max_new_tokens max_response_length max_response_len max_completion_length"
    ),
    ("prompts.max_prompt_tokens",): "max_prompt_length",
    ("steps", "sft.steps"): "max_steps num_steps total_steps total_training_steps",
    ("curriculum.max_epochs",): "epochs num_epochs num_train_epochs total_epochs",
    ("policy.path",): "model model_path model_name_or_path pretrain",
    ("checkpoint.every_steps",): "save_freq save_interval save_steps",
    ("validation.every_steps",): "test_freq eval_interval eval_steps",
    ("loss.name",): "loss_type",
    ("loss.clip_low",): "clip_ratio_low eps_clip",
    ("loss.clip_high",): "clip_ratio_high eps_clip_high",
    ("engine.count",): "num_engines",
    ("engine.vllm.gpu_memory_utilization",): "gpu_memory_utilization",
    ("engine.vllm.max_model_len",): "max_model_len",
    ("engine.vllm.max_num_seqs",): "max_num_seqs",
}
OTHER_NAMES = {name: settings for settings, names in _NAMES.items() for name in names.split()}
"""Another name -> the settings that have this meaning in a recipe, the most common first."""


def setting_of(key: str) -> str | None:
    """The setting that other frameworks call as the last part of a dotted `key`: that of the key's own section, if it
    is set in several; None for a name that is not in `OTHER_NAMES`."""
    *section, last = key.split(".")
    found = OTHER_NAMES.get(last.lower().replace("-", "_"))

    def shared(setting: str) -> int:
        common = 0
        for here, there in zip(section, setting.split(".")):
            if here != there:
                break
            common += 1
        return common

    return max(found, key=shared) if found else None


_NEAR_BESIDE, _NEAR_ELSEWHERE, _FAR_BESIDE = 0.8, 0.9, 0.65
"""Least likeness of a name to be suggested: in the same section, in another one, where only a name that is nearly the
same was meant, and in the same section if there is none of these."""
_MOST_LISTED = 12
_MOST_NEAREST = 3


def check_keys(
    where: str,
    given: Iterable[object],
    known: Iterable[str],
    *,
    expected: str,
    in_recipe: bool = False,
    listed: str = "",
) -> None:
    """Raise ValueError for the first of the `given` keys that is not `known`; arguments as for `unknown_key`.

    in_recipe: `where` is a section of the recipe, whose keys have other names in other frameworks.
    """
    names = list(known)
    for key in given:
        if key not in names:
            setting = setting_of(f"{where}.{key}") if in_recipe else None
            text = unknown_key(str(key), names, expected=expected, setting=setting, listed=listed)
            raise ValueError(f"{where}: {text}")


def unknown_key(
    key: str,
    known: Iterable[str],
    *,
    expected: str,
    setting: str | None = None,
    kind: str = "keys",
    listed: str = "",
) -> str:
    """`KEY is not ...; the nearest is ...`, and without a near one `...; keys here: a, b, c`.

    Dotted keys are compared with those of their own section, then by their last part with all others. expected: what
    `known` holds, as in "a recipe key"; kind: the same in one word. setting: what KEY is called here, if that is
    known (`setting_of`). listed: where the keys are listed that are too many for a line.
    """
    text = f"{key} is not {expected}"
    if setting is not None:
        return f"{text}; it is set by {setting}"
    names = list(known)
    section, last = key.rpartition(".")[::2]
    beside = [name for name in names if name.rpartition(".")[0] == section]
    others = [name for name in names if ".NAME." not in name]
    for among, least in ((beside, _NEAR_BESIDE), (others, _NEAR_ELSEWHERE), (beside, _FAR_BESIDE)):
        if nearest := _nearest(last, among, least):
            return f"{text}; the nearest is {' or '.join(nearest)}"
    if 0 < len(beside) <= _MOST_LISTED:
        return f"{text}; {kind} here: {', '.join(name.rpartition('.')[2] for name in beside)}"
    return f"{text}; all {kind} are listed in {listed}" if listed else text


def _nearest(last: str, names: Collection[str], least: float) -> list[str]:
    """Those most like `last`, if they are at least so much like it and no more than a few."""
    alike = {name: _likeness(last, name.rpartition(".")[2]) for name in names}
    best = max(alike.values(), default=0.0)
    found = [name for name in names if alike[name] == best]
    return found if best >= least and len(found) <= _MOST_NEAREST else []


def _likeness(given: str, name: str) -> float:
    """From 0 to 1, at least 0.7 for a `name` with all words of `given`, as warmup_steps has those of warmup."""
    within = len(given) > 3 and set(given.split("_")) <= set(name.split("_"))
    return max(SequenceMatcher(None, given, name).ratio(), 0.7 if within else 0.0)
