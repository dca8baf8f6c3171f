"""Settings of a recipe by the names that other frameworks have for them."""

from __future__ import annotations

_TP = ("megatron.parallel.tensor_model_parallel_size", "engine.vllm.tensor_parallel_size")
_PP = ("megatron.parallel.pipeline_model_parallel_size", "engine.vllm.pipeline_parallel_size")
_EP = ("megatron.parallel.expert_model_parallel_size", "engine.vllm.enable_expert_parallel")
_CP = ("megatron.parallel.context_parallel_size",)
_DP = ("trainer.world_size", "engine.vllm.data_parallel_size")
_ETP = ("megatron.parallel.expert_tensor_parallel_size",)
_LR = ("optimizer.lr", "sft.lr")
_CLIP = ("optimizer.clip_grad",)
_STALENESS = ("rollouts.max_staleness_steps",)
_BATCH = ("rollouts.groups_per_batch", "sft.batch_size")
_GROUP = ("rollouts.group_size", "validation.generations", "evaluation.generations")
_COMPLETION = ("interruption.thinking_tokens and interruption.answer_tokens", "rewards.length_penalty.max_tokens")
_STEPS = ("steps", "sft.steps")
_EPOCHS = ("curriculum.max_epochs",)
_POLICY = ("policy.path",)
_SAVE = ("checkpoint.every_steps",)
_VALIDATE = ("validation.every_steps",)

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("learning_rate", "lr", "actor_learning_rate"), _LR),
    **dict.fromkeys(("max_grad_norm", "grad_clip", "gradient_clipping"), _CLIP),
    **dict.fromkeys(("tp", "tp_size", "tensor_parallel", "tensor_parallel_size", "tensor_model_parallel_size"), _TP),
    **dict.fromkeys(
        ("pp", "pp_size", "pipeline_parallel", "pipeline_parallel_size", "pipeline_model_parallel_size"), _PP
    ),
    **dict.fromkeys(("ep", "ep_size", "expert_parallel", "expert_parallel_size", "expert_model_parallel_size"), _EP),
    **dict.fromkeys(("cp", "cp_size", "context_parallel", "context_parallel_size"), _CP),
    **dict.fromkeys(("dp", "dp_size", "data_parallel", "data_parallel_size"), _DP),
    **dict.fromkeys(("etp", "etp_size", "expert_tensor_parallel_size"), _ETP),
    **dict.fromkeys(("k", "max_off_policy_steps", "max_staleness", "staleness"), _STALENESS),
    **dict.fromkeys(("batch_size", "train_batch_size", "rollout_batch_size", "num_prompts_per_step"), _BATCH),
    **dict.fromkeys(
        ("n", "num_generations", "n_samples_per_prompt", "num_generations_per_prompt", "n_samples"), _GROUP
    ),
    **dict.fromkeys(
        ("max_tokens", "max_new_tokens", "max_response_length", "max_response_len", "max_completion_length"),
        _COMPLETION,
    ),
    "max_prompt_length": ("prompts.max_prompt_tokens",),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps", "total_training_steps"), _STEPS),
    **dict.fromkeys(("epochs", "num_epochs", "num_train_epochs", "total_epochs"), _EPOCHS),
    **dict.fromkeys(("model", "model_path", "model_name_or_path", "pretrain"), _POLICY),
    **dict.fromkeys(("save_freq", "save_interval", "save_steps"), _SAVE),
    **dict.fromkeys(("test_freq", "eval_interval", "eval_steps"), _VALIDATE),
    "loss_type": ("loss.name",),
    **dict.fromkeys(("clip_ratio_low", "eps_clip"), ("loss.clip_low",)),
    **dict.fromkeys(("clip_ratio_high", "eps_clip_high"), ("loss.clip_high",)),
    "num_engines": ("engine.count",),
    "gpu_memory_utilization": ("engine.vllm.gpu_memory_utilization",),
    "max_model_len": ("engine.vllm.max_model_len",),
    "max_num_seqs": ("engine.vllm.max_num_seqs",),
}
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
